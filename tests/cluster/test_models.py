"""`ModelSpec` from configs: against the models that transformers builds, and errors. Presets: `test_model_families`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from helpers.moe_families import small_config
from trimtab import InputError, ModelSpec
from trimtab.cluster import QWEN3_30B, load_model
from trimtab.cluster.models import model_like
from trimtab.cluster.presets import preset_names

QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts": 32, "num_experts_per_tok": 4, "hidden_size": 128,
    "intermediate_size": 512, "moe_intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 1000, "torch_dtype": "bfloat16",
}  # fmt: skip


def read(tmp_path: Path, config: Any) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return ModelSpec.from_config(tmp_path)


def test_the_default_model_has_every_size() -> None:
    assert ModelSpec(
        "qwen3-30b-a3b", num_experts=128, top_k=8, hidden_size=2048, expert_width=768, weight_bytes=2, moe_layers=48,
        attention_parameters=2048 * 128 * (32 + 4 + 4 + 32), attention_width=32 * (128 + 128), vocab_size=151936,
        moe_layer_indices=tuple(range(48)), attention_heads=32, cache_width=2 * 4 * 128, cache_heads=4,
    ) == QWEN3_30B  # fmt: skip


def test_latent_attention_has_the_parameters_worked_out_by_hand() -> None:
    """DeepSeek-V3: queries through 1536, keys and values through 512, 64 rotary; 128 heads of 128 + 64 and 128."""
    model = ModelSpec.named("deepseek-v3")
    query = 7168 * 1536 + 1536 * 128 * 192
    assert model.attention_parameters == query + 7168 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168
    assert model.attention_width == 128 * (192 + 128)
    assert ModelSpec.named("glm-4.5-air").attention_width == 2 * 96 * 128
    assert (model.moe_layers, model.dense_layers, model.dense_width, model.shared_width) == (58, 3, 18432, 2048)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"mlp_only_layers": [1], "intermediate_size": 48}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "intermediate_size": 48}),
        ("mixtral", {}),
        ("gpt_oss", {}),
        ("glm4_moe", {"first_k_dense_replace": 2, "intermediate_size": 48}),
        ("deepseek_v3", {"first_k_dense_replace": 1, "intermediate_size": 48}),
        ("deepseek_v3", {"q_lora_rank": None}),
    ],
)
def test_sizes_are_those_that_transformers_builds(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = small_config(model_type, **changes)
    config.tie_word_embeddings = False
    config.save_pretrained(tmp_path)
    spec = ModelSpec.from_config(tmp_path)
    assert (spec.name, spec.moe_layers + spec.dense_layers) == (model_type, config.num_hidden_layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = [tensor for name, tensor in model.named_parameters() if tensor.ndim > 1 and not name.endswith("bias")]
    assert spec.parameters == sum(tensor.numel() for tensor in matrices)


def test_shared_experts_may_have_another_width(tmp_path: Path) -> None:
    assert read(tmp_path, {**QWEN, "shared_expert_intermediate_size": 96}).shared_width == 96
    assert read(tmp_path, {**QWEN, "n_shared_experts": 2}).shared_width == 128


def test_text_config_of_a_multimodal_model_is_read(tmp_path: Path) -> None:
    outer = {"model_type": "kimi_k25", "vision_config": {"hidden_size": 7}, "text_config": QWEN}
    nested = read(tmp_path, outer)
    assert nested.name == "kimi_k25"
    assert nested.parameters == read(tmp_path, QWEN).parameters


@pytest.mark.parametrize(
    ("dtype", "weight_bytes"),
    [
        ({"torch_dtype": "bfloat16"}, 2),
        ({"torch_dtype": None, "dtype": "float32"}, 4),
        ({"torch_dtype": "torch.float64"}, 8),
        ({"torch_dtype": "float8_e4m3fn"}, 2),
        ({"torch_dtype": "float32", "quantization_config": {"quant_method": "fp8"}}, 2),
        ({"torch_dtype": None}, 2),
    ],
)
def test_weight_bytes_follow_the_dtype(dtype: dict[str, Any], weight_bytes: int, tmp_path: Path) -> None:
    assert read(tmp_path, {**QWEN, **dtype}).weight_bytes == weight_bytes


def test_missing_keys_keep_the_values_for_unknown(tmp_path: Path) -> None:
    little = {"num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 16, "intermediate_size": 32}
    assert read(tmp_path, little) == ModelSpec(tmp_path.name, num_experts=8, top_k=2, hidden_size=16, expert_width=32)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts": None}, "none of the keys num_experts, .* --set num_experts=N"),
        ({"num_experts": 0}, "num_experts should be a whole number from 1"),
        ({"num_experts_per_tok": 33}, "33 of 32 experts"),
        ({"hidden_size": "128"}, "hidden_size should be a whole number"),
        ({"hidden_size": True}, "hidden_size should be a whole number"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers should be a whole number"),
        ({"mlp_only_layers": [0, 1, 2, 3, 4, 5]}, "none of the 6 layers has experts"),
        ({"mlp_only_layers": 3}, "mlp_only_layers should be a list of whole numbers"),
        ({"moe_layer_freq": [1, 1]}, "moe_layer_freq has 2 entries"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types has 1 entries"),
        ({"kv_lora_rank": 8}, "qk_nope_head_dim"),
    ],
)
def test_errors_in_a_config_are_one_line(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says) as caught:
        read(tmp_path, {**QWEN, **changes})
    assert "config.json: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"])
def test_files_that_are_not_configs_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=r"config\.json: "):
        ModelSpec.from_config(tmp_path)


anything: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([]) | st.just({})
)
KEYS = sorted(
    {"first_k_dense_replace", "moe_layer_freq", "mlp_only_layers", "mlp_layer_types", "decoder_sparse_step", *QWEN}
    | {"interleave_moe_layer_step", "moe_layers"}
    | {"kv_lora_rank", "q_lora_rank", "text_config", "n_shared_experts", "quantization_config", "dtype"}
)


@given(changes=st.dictionaries(st.sampled_from(KEYS), anything | st.lists(anything, max_size=6), max_size=4))
@settings(max_examples=100)
def test_any_config_is_read_or_refused(changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "any_config"
    folder.mkdir(exist_ok=True)
    try:
        model = read(folder, {**QWEN, **changes})
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert 0 < model.active_parameters <= model.parameters
        assert model.moe_layers > 0


def test_models_load_by_name_or_path(tmp_path: Path) -> None:
    assert load_model("kimi-k2") == ModelSpec.named("kimi-k2")
    config = read(tmp_path, QWEN)
    assert load_model(str(tmp_path)) == load_model(str(tmp_path / "config.json")) == config
    with pytest.raises(InputError, match=r"neither a model that comes with Trimtab .*glm-4.5-air, .* nor a file"):
        load_model("qwen4")
    with pytest.raises(InputError, match=r"with Trimtab \(nearest: .*Qwen/Qwen3-30B-A3B.*\) nor a file"):
        load_model("qwen/qwen3-31b-a3b")
    with pytest.raises(InputError, match=r"no such model; Trimtab has deepseek-v3, .*qwen3-30b-a3b"):
        ModelSpec.named("qwen4")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no such file"):
        load_model(str(tmp_path / "empty"))


def test_the_model_like_a_trace_has_its_layers_if_there_is_one() -> None:
    """Qwen3-30B-A3B and Qwen3-235B-A22B both have 128 experts, top-8."""
    assert [model_like(128, 8, layers).name for layers in (48, 94)] == ["qwen3-30b-a3b", "qwen3-235b-a22b"]
    # Of a trace of a few layers the smallest.
    models = [ModelSpec.named(name) for name in preset_names("model")]
    alike = [model for model in models if (model.num_experts, model.top_k) == (128, 8)]
    assert model_like(128, 8, 3) == min(alike, key=lambda model: model.parameters)
    with pytest.raises(InputError, match="no model that comes with Trimtab has 5 experts, top-2"):
        model_like(5, 2, 3)
