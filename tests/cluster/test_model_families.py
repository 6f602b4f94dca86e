"""Presets and families: published sizes, the models that transformers builds, and layers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.llama4.modeling_llama4 import Llama4VisionModel

from experiments.site.reference_pages import models_page
from trimtab import InputError, ModelSpec
from trimtab.cluster.config_keys import FAMILIES
from trimtab.cluster.model_config import ConfigReading, read_sizes
from trimtab.cluster.presets import preset_names, read_preset

PRESETS = preset_names("model")
# Published with the vision tower, which is no part of the spec.
WITH_VISION = ("llama-4-scout", "llama-4-maverick")
# Model types that transformers has under another name, or not at all.
TYPES = {"kimi_k2": "deepseek_v3", "minimax_m1": "minimax", "step3_text": None}


def config_of(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(read_preset("model", name) or "")
    return content


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_sizes(name: str) -> None:
    model, published = ModelSpec.named(name), config_of(name)["published"]
    assert published["source"]
    total = (model.parameters + (vision_parameters() if name in WITH_VISION else 0)) / 1e9
    assert total == pytest.approx(published["total_billions"], rel=0.01)
    # Authors count neither embedding nor head, or one, or both.
    embedding = model.vocab_size * model.hidden_size
    counted = [(model.active_parameters + times * embedding) / 1e9 for times in (-1, 0, 1)]
    active = published["active_billions"]
    last_digit = 10.0 ** int(Decimal(str(active)).as_tuple().exponent)
    assert min(abs(value - active) for value in counted) <= max(0.03 * active, last_digit)
    assert model.moe_layers == len(model.moe_layer_indices)


def vision_parameters() -> int:
    """Of the vision tower of Llama 4, as transformers builds it for the sizes of Scout and Maverick."""
    sizes = AutoConfig.for_model("llama4").vision_config
    sizes.update({"hidden_size": 1408, "num_hidden_layers": 34, "num_attention_heads": 16, "intermediate_size": 5632})
    with torch.device("meta"):
        return sum(tensor.numel() for tensor in Llama4VisionModel(sizes).parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_sizes_are_those_of_the_model_that_transformers_builds(name: str) -> None:
    """At full size: all weights within 0.1%, and the layers with experts."""
    config = {key: value for key, value in config_of(name).items() if key not in ("hub_ids", "published")}
    model_type = TYPES.get(config["model_type"], config["model_type"])
    if model_type is None:
        pytest.skip("transformers doesn't have this model")
    config["model_type"] = model_type
    if "attn_type_list" in config:
        kinds = config.pop("attn_type_list")
        config["layer_types"] = ["full_attention" if kind else "linear_attention" for kind in kinds]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    spec, sizes = ModelSpec.named(name), {path: tensor.numel() for path, tensor in model.named_parameters()}
    routed = {
        path: size
        for path, size in sizes.items()
        if "experts." in path and "shared" not in path and model.get_parameter(path).ndim > 1 and "bias" not in path
    }
    if spec.zero_experts:
        # transformers also allocates gate and up for experts that have none.
        for path in routed:
            first = model.get_parameter(path).shape[0]
            sizes[path] = routed[path] = sizes[path] * spec.num_experts // first
    assert spec.parameters == pytest.approx(sum(sizes.values()), rel=1e-3)
    with_experts = {int(next(part for part in path.split(".") if part.isdigit())) for path in routed}
    assert with_experts == set(spec.moe_layer_indices)
    assert spec.moe_layers * spec.num_experts * spec.expert_parameters == sum(routed.values())


QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts": 32, "num_experts_per_tok": 4, "hidden_size": 128,
    "intermediate_size": 512, "moe_intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 1000,
}  # fmt: skip


def read(config: dict[str, Any], **overrides: Any) -> tuple[ModelSpec, ConfigReading]:
    sizes, reading = read_sizes(config, "config.json", overrides)
    return ModelSpec(**sizes), reading


def kinds_of(model: ModelSpec) -> list[tuple[str, int, int]]:
    return [(block.kind, block.in_moe_layers, block.in_dense_layers) for block in model.attention]


@pytest.mark.parametrize(
    ("changes", "moe_layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"moe_layer_freq": 2}, (0, 2, 4)),
        ({"moe_layer_freq": 2, "first_k_dense_replace": 1}, (2, 4)),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, (1, 2, 4, 5)),
        ({"mlp_layer_types": ["dense"] + ["sparse"] * 5}, (1, 2, 3, 4, 5)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (5,)),
        ({"interleave_moe_layer_step": 2}, (1, 3, 5)),
        ({"interleave_moe_layer_step": 2, "moe_layers": [1, 5]}, (1, 5)),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, (1, 3, 5)),
        ({"expert_layer_period": 3, "expert_layer_offset": 0}, (0, 3)),
        ({"moe_layers_enum": "1,2,4"}, (1, 2, 4)),
        ({"moe_layers_enum": [5]}, (5,)),
        ({"moe_layer_start_index": 2, "moe_layer_end_index": 4}, (2, 3, 4)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 2}, (1, 3, 5)),
        ({"moe_layer_start_index": [1, 2], "moe_layer_end_index": [5, 4]}, (1, 2, 3, 4, 5)),
        ({"num_dense_layers": 4}, (4, 5)),
        ({"moe_layer_num_skipped": 5}, (5,)),
        ({"hybrid_override_pattern": "ME*E-M"}, (1, 3)),
        ({"layers_block_type": ["mamba", "moe", "attention", "moe", "mlp", "moe"]}, (1, 3, 5)),
    ],
)
def test_layers_with_experts_by_family(changes: dict[str, Any], moe_layers: tuple[int, ...]) -> None:
    model, _ = read(QWEN | {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16} | changes)
    assert model.moe_layer_indices == moe_layers
    assert (model.moe_layers, model.dense_layers) == (len(moe_layers), 6 - len(moe_layers))
    if not any("pattern" in key or "block" in key for key in changes):
        assert model.dense_width == (512 if model.dense_layers else 0)


LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "kinds", "reach"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 64}, "wfwfwf", 64),
        ({"model_type": "gpt_oss", "sliding_window": 32}, "wfwfwf", 32),
        ({"sliding_window": 64}, "wwwwww", 64),
        ({"sliding_window": 64, "use_sliding_window": False}, "ffffff", 0),
        ({"sliding_window": None}, "ffffff", 0),
        ({"attention_chunk_size": 100, "no_rope_layer_interval": 3}, "ccfccf", 100),
        ({"attention_chunk_size": 100, "no_rope_layers": [0, 1, 1, 1, 1, 0]}, "fccccf", 100),
        ({"index_topk": 50, "index_n_heads": 2, "index_head_dim": 8}, "ssssss", 50),
        ({"full_attention_interval": 3, **LINEAR}, "llfllf", 0),
        ({"model_type": "qwen3_next", **LINEAR}, "lllfll", 0),
        ({"model_type": "minimax_m1", "attn_type_list": [0, 0, 1, 0, 0, 1]}, "llfllf", 0),
        ({"attn_layer_period": 3, "attn_layer_offset": 1}, "lfllfl", 0),
    ],
)
def test_attention_by_layer(changes: dict[str, Any], kinds: str, reach: int) -> None:
    """Layers 0 and 1 are dense."""
    model, reading = read(QWEN | {"mlp_only_layers": [0, 1]} | changes)
    names = {"f": "full", "w": "window", "c": "chunk", "s": "sparse", "l": "linear"}
    expected = {names[letter]: (kinds[2:].count(letter), kinds[:2].count(letter)) for letter in dict.fromkeys(kinds)}
    found = {kind: (inside, outside) for kind, inside, outside in kinds_of(model)}
    assert found == ({} if set(kinds) == {"f"} else expected)
    assert (model.reach, model.chunked) == (reach, "c" in kinds)
    assert reading.text == ""


def test_nemotron_has_experts_of_two_matrices_and_layers_of_one_part() -> None:
    model = ModelSpec.named("nemotron-3-nano-30b-a3b")
    assert kinds_of(model) == [("linear", 0, 23), ("full", 0, 6)]
    assert (model.expert_parameters, model.dense_width) == (2 * 2688 * 1856, 0)
    assert model.shared_parameters == 2 * 2688 * 3712
    with_feed_forward, _ = read(QWEN | {"hybrid_override_pattern": "*E*E--", "mlp_hidden_act": "relu2"})
    # Two of four layers without experts have a feed-forward part.
    assert with_feed_forward.dense_width == 256
    assert with_feed_forward.dense_parameters == 2 * 1000 * 128 + 2 * 20 * 128 * 32 + 2 * (32 * 128 + 2 * 128 * 512)


def test_a_layer_of_longcat_has_two_attention_blocks_and_two_dense_parts() -> None:
    model = ModelSpec.named("longcat-flash")
    assert kinds_of(model) == [("full", 56, 0)]
    assert (model.num_experts, model.top_k, model.zero_experts, model.shared_width) == (512, 12, 256, 2 * 12288)
    # A third of the choices are zero experts on average.
    saved = 28 * 4 * model.expert_parameters
    assert replace(model, zero_experts=0).active_parameters - model.active_parameters == saved - 28 * 256 * 6144


def test_widths_and_attention_of_presets_worked_out_by_hand() -> None:
    llama = ModelSpec.named("llama-4-maverick")
    assert (llama.shared_width, llama.dense_width, llama.expert_width) == (8192, 16384, 8192)
    assert kinds_of(llama) == [("chunk", 12, 24), ("full", 12, 0)]
    # One key, and queries through a low rank.
    step = ModelSpec.named("step-3")
    query = 7168 * 2048 + 2048 * 64 * 256
    assert step.attention_parameters == query + 7168 * 2 * 256 + 64 * 256 * 7168
    assert (step.shared_width, step.attention_width) == (5120, 64 * 512)
    narrow = ModelSpec.named("nemotron-3-super-120b-a12b")
    assert (narrow.row_width, narrow.expert_parameters) == (1024, 2 * 1024 * 2688)
    assert narrow.shared_parameters == 2 * 4096 * 5376 + 2 * 4096 * 1024


def test_sizes_in_parts_of_a_config() -> None:
    """DBRX: 132 billion weights, 36 of them active (its model card)."""
    model, reading = read({
        "model_type": "dbrx", "d_model": 6144, "n_layers": 40, "n_heads": 48, "vocab_size": 100352,
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    })  # fmt: skip
    assert model.parameters / 1e9 == pytest.approx(132, rel=0.01)
    assert model.active_parameters / 1e9 == pytest.approx(36, rel=0.01)
    assert reading.text == ""


def test_windows_may_have_heads_of_their_own() -> None:
    model, _ = read(
        QWEN | {"num_attention_groups": 2, "sliding_window": 8}
        | {"layer_types": ["full_attention", "sliding_attention"] * 3}
        | {"attention_other_setting": {"num_attention_heads": 16, "num_attention_groups": 4}}
    )  # fmt: skip
    full, window = model.attention
    assert (full.parameters, full.width) == (2 * 128 * 10 * 32, 8 * 64)
    assert (window.parameters, window.width) == (2 * 128 * 20 * 32, 16 * 64)


def test_attention_without_known_heads_has_square_projections() -> None:
    config = {key: value for key, value in QWEN.items() if "head" not in key}
    windows, _ = read(config | {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 3})
    assert [(block.parameters, block.width) for block in windows.attention] == [(4 * 128**2, 2 * 128)] * 2
    plain, _ = read(config)
    assert (plain.moe_attention.parameters, plain.moe_attention.square_width) == (4 * 128**2, 2 * 128)


@pytest.mark.parametrize(
    "changes", [{}, {"mamba_dt_rank": 24, "mamba_d_conv": 8, "mamba_d_state": 32, "mamba_expand": 3}]
)
def test_weights_of_mamba_are_those_that_transformers_builds(changes: dict[str, Any]) -> None:
    """But for biases and the skip connection, which are few."""
    jamba = QWEN | {"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
    model, _ = read(jamba | changes)
    (mamba,) = (block for block in model.attention if block.kind == "linear")
    with torch.device("meta"):
        mixer = JambaMambaMixer(AutoConfig.for_model(**jamba | changes), 0)
    built = sum(
        tensor.numel() for name, tensor in mixer.named_parameters() if "bias" not in name and "norm" not in name
    )
    assert built - mamba.parameters == mixer.D.numel()


def test_quantized_weights_are_computed_in_two_bytes() -> None:
    assert [read(QWEN | more)[0].weight_bytes for more in ({}, {"torch_dtype": "float32"})] == [2, 4]
    assert read(QWEN | {"torch_dtype": "float32", "quantization_config": {"bits": 8}})[0].weight_bytes == 2


def test_vision_experts_are_left_out_and_named() -> None:
    config = QWEN | {"model_type": "ernie4_5_vl_moe", "moe_num_experts": [8, 4], "moe_intermediate_size": [32, 16]}
    del config["num_experts"]
    model, reading = read(config)
    assert (model.num_experts, model.expert_width) == (8, 32)
    assert "vision experts, are left out" in reading.text


def test_a_tied_embedding_counts_once() -> None:
    untied, tied = (read(QWEN | {"tie_word_embeddings": tied})[0] for tied in (False, True))
    assert untied.parameters - tied.parameters == 1000 * 128
    assert untied.active_parameters == tied.active_parameters


def test_lists_with_one_number_for_all_layers_are_that_number() -> None:
    model, _ = read(QWEN | {"moe_topk": [4] * 6, "num_experts_per_tok": None, "num_shared_expert": [1] * 6})
    assert (model.top_k, model.shared_width) == (4, 64)
    with pytest.raises(InputError, match=r"num_experts_per_tok should be .* the same in all layers; .* --set num_exp"):
        read(QWEN | {"num_experts_per_tok": [4, 4, 4, 4, 4, 8]})


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name in CONFIG_MAPPING])
def test_whole_configs_of_known_families_have_no_line(model_type: str) -> None:
    """With all keys that transformers writes, many more than the presets."""
    config = AutoConfig.for_model(model_type).to_dict()
    # The defaults of some have no experts, or no number of a token.
    missing = {
        "deepseek_v2": {"num_experts_per_tok": 6},
        "gemma4": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64, "hidden_size_per_layer_input": 0},
    }
    config.get("text_config", config).update(missing.get(model_type, {}))
    _, reading = read(config)
    assert reading.is_known
    assert reading.ignored == ()
    assert reading.text == "" or "vision experts" in reading.text


LARGE_3 = {
    "dim": 7168, "n_layers": 61, "head_dim": 128, "hidden_dim": 16384, "n_heads": 128, "n_kv_heads": 128,
    "vocab_size": 131072, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "kv_lora_rank": 512,
    "v_head_dim": 128, "tied_embeddings": False,
    "moe": {
        "expert_parallel": 1, "expert_model_parallel": 1, "route_every_n": 1, "first_k_dense_replace": 3,
        "num_experts": 128, "num_experts_per_tok": 4, "num_expert_groups": 1, "num_expert_groups_per_tok": 1,
        "routed_scale": 1.0, "expert_hidden_dim": 4096, "num_shared_experts": 1,
    },
}  # fmt: skip
PANGU = {
    "model_type": "pangu_ultra_moe", "attention_kv_lora_dim": 512, "attention_q_lora_dim": 1536,
    "attention_qk_dim": 128, "attention_qk_rope_dim": 64, "attention_v_dim": 128, "hidden_size": 7680,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 128, "num_dense_layers": 3,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_mtp_layers": 1,
    "num_routed_experts": 256, "num_shared_experts": 1, "vocab_size": 153600,
}  # fmt: skip
ARCTIC = {
    "model_type": "arctic", "hidden_size": 7168, "intermediate_size": 4864, "num_hidden_layers": 35,
    "num_attention_heads": 56, "num_key_value_heads": 8, "num_local_experts": 128, "num_experts_per_tok": 2,
    "moe_layer_frequency": 1, "parallel_attn_mlp_res": True, "vocab_size": 32000,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 2816, "intermediate_size": 2112, "moe_intermediate_size": 704,
    "num_experts": 128, "top_k_experts": 8, "enable_moe_block": True, "num_hidden_layers": 30,
    "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2, "head_dim": 256,
    "global_head_dim": 512, "attention_k_eq_v": True, "sliding_window": 1024, "vocab_size": 262144,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "experts", "moe_layers", "total", "active"),
    [
        # As their authors count: the vision tower of Mistral Large 3, 2.5 billion, is no part.
        (LARGE_3, (128, 4), 58, 673, 39),
        (PANGU, (256, 8), 58, 718, 39),
        (ARCTIC, (128, 2), 35, 480, 17),
        ({"text_config": GEMMA, "model_type": "gemma4"}, (128, 8), 30, 25.2, 3.8),
        ({"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8,
          "vocab_size": 32000, "moe": {"num_experts_per_tok": 2, "num_experts": 8}}, (8, 2), 32, 46.7, 12.9),
    ],
    ids=["mistral-large-3", "openpangu", "arctic", "gemma-4", "mixtral"],
)  # fmt: skip
def test_other_names_of_sizes(
    config: dict[str, Any], experts: tuple[int, int], moe_layers: int, total: float, active: float
) -> None:
    model, reading = read(config)
    assert (model.num_experts, model.top_k) == experts
    assert (model.moe_layers, len(model.moe_layer_indices)) == (moe_layers, moe_layers)
    assert model.parameters / 1e9 == pytest.approx(total, rel=0.01)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.03)
    assert reading.text == ""


def test_sizes_of_gemma_are_those_that_transformers_builds() -> None:
    config = {**GEMMA, "num_hidden_layers": 6, "layer_types": GEMMA["layer_types"][:6], "vocab_size": 1000}
    model, _ = read(config)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    matrices = sum(tensor.numel() for tensor in built.parameters() if tensor.ndim > 1)
    assert model.parameters == matrices
    assert replace(read(built.config.to_dict())[0], name="") == replace(model, name="")


def test_every_second_layer_of_arctic_has_experts() -> None:
    model, _ = read(ARCTIC | {"moe_layer_frequency": 2})
    assert model.moe_layer_indices == tuple(range(1, 35, 2))
    assert (model.shared_width, model.dense_layers, model.dense_width) == (7168, 18, 4864)


def test_the_thinker_of_an_omni_model_is_read() -> None:
    text = {key: value for key, value in QWEN.items() if key != "model_type"}
    talker = {"text_config": {"num_experts": 3, "num_hidden_layers": 2}}
    thinker = {"text_config": text | {"model_type": "qwen3_omni_moe_text"}, "audio_config": {"num_hidden_layers": 9}}
    model, reading = read({"model_type": "qwen3_omni_moe", "thinker_config": thinker, "talker_config": talker})
    assert replace(model, name="") == replace(read(QWEN)[0], name="")
    assert reading.text == ""


def test_a_head_of_width_0_is_left_out() -> None:
    assert read(QWEN | {"head_dim": 0})[0] == read({key: QWEN[key] for key in QWEN if key != "head_dim"})[0]


def test_a_line_names_what_is_not_read() -> None:
    _, reading = read(QWEN | {"kv_share_layers": 3, "rope_theta": 10_000, "moe_hash_dim": 64, "expert_bias": True})
    assert reading.ignored == ("kv_share_layers", "moe_hash_dim")
    assert {"num_experts", "hidden_size", "head_dim", "num_hidden_layers"} <= set(reading.used)
    assert "config.json: keys that are not read: kv_share_layers, moe_hash_dim" in reading.text
    _, unknown = read(QWEN | {"model_type": "newmoe"})
    assert "model type newmoe is unknown" in unknown.text
    _, odd = read(QWEN | {"layer_types": ["full_attention"] * 5 + ["holographic"]})
    assert "layers of type holographic count as full attention" in odd.text


def test_layers_of_multi_token_prediction_are_no_decoder_layers() -> None:
    kinds = ["full_attention", "sliding_attention"] * 4
    model, _ = read(QWEN | {"layer_types": kinds, "num_nextn_predict_layers": 2, "sliding_window": 8})
    assert kinds_of(model) == [("full", 3, 0), ("window", 3, 0)]


def test_overrides_replace_keys() -> None:
    model, _ = read(QWEN, num_experts_per_tok=2, moe_layers_enum="1,2", num_shared_experts=1)
    assert (model.top_k, model.moe_layers, model.shared_width) == (2, 2, 64)
    nested, _ = read({"model_type": "some_vl", "text_config": QWEN}, num_hidden_layers=3)
    assert nested.moe_layers == 3


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"num_expert": 8}, "--set num_expert: no key that sizes .* did you mean num_experts"),
        ({"rope_theta": 8}, "--set rope_theta: no key that sizes of this model are read from; used are num_experts, "),
        ({"num_experts": "many"}, "num_experts should be a whole number"),
        ({"hybrid_override_pattern": "MEX"}, "should be a word of the letters M"),
        ({"hybrid_override_pattern": "ME"}, "num_hidden_layers is 6; the pattern of layers has 2"),
        ({"moe_layers_enum": "a,b"}, "moe_layers_enum should be numbers"),
        ({"moe_layer_end_index": 10**9}, "should be numbers of layers"),
        (
            {"layer_types": ["sliding_attention", "chunked_attention"] * 3, "sliding_window": 8},
            "sliding_window and attention_chunk_size limit attention",
        ),
    ],
)
def test_bad_overrides_are_one_line(overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        read(QWEN, **overrides)
    assert "\n" not in str(caught.value)


def test_the_reference_shows_every_preset() -> None:
    rows = [line.strip("|").split("|") for line in models_page().splitlines()]
    shown = {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in rows if len(row) == 7}
    for name in PRESETS:
        model = ModelSpec.named(name)
        experts, layers, widths, attention, weights, active = shown[name]
        assert experts == f"{model.num_experts}, {model.top_k}"
        assert layers == f"{model.moe_layers} + {model.dense_layers}"
        assert widths == f"{model.hidden_size}, {model.expert_width}"
        assert (weights, active) == (f"{model.parameters / 1e9:.1f} B", f"{model.active_parameters / 1e9:.1f} B")
        blocks = [block.in_moe_layers + block.in_dense_layers for block in model.attention]
        assert attention == "full" if not blocks else [int(part.split()[0]) for part in attention.split(", ")] == blocks


@pytest.mark.parametrize("name", ["num_local_experts", "n_routed_experts", "num_layers", "d_model", "moe_topk"])
def test_an_override_wins_over_other_names_of_its_size(name: str) -> None:
    sizes = {"num_local_experts": "num_experts", "n_routed_experts": "num_experts", "d_model": "hidden_size"}
    usual = sizes | {"num_layers": "num_hidden_layers", "moe_topk": "num_experts_per_tok"}
    assert read(QWEN, **{name: 4})[0] == read(QWEN | {usual[name]: 4})[0]


@pytest.mark.parametrize("odd", [5, None, [], "x", {"0": 5}, {"0": {"head_dim": "512", "num_key_value_heads": -1}}])
def test_odd_sizes_of_a_layer_are_left_out(odd: Any) -> None:
    model, _ = read(GEMMA | {"per_layer_config": odd})
    assert model == read(GEMMA)[0]
    assert read({**GEMMA, "per_layer_config": odd, "global_head_dim": None})[0] == model


@pytest.mark.parametrize("config", [QWEN, GEMMA, LARGE_3, PANGU, ARCTIC])
def test_routing_alone_is_read_without_a_line(config: dict[str, Any]) -> None:
    sizes, reading = read_sizes(config, "config.json", {}, routing_alone=True)
    assert reading.text == ""
    assert ModelSpec(**sizes) == read(config)[0]
    assert (
        read_sizes(config | {"v_head_dim": "x", "head_dim": "x"}, "config.json", {}, routing_alone=True)[1].text == ""
    )
