"""A renumbered checkpoint computes the logits of the original, in every family of MoE models that transformers has."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from helpers.equality import relative_error
from helpers.moe_families import MODEL_TYPES, MOE_LAYERS, NUM_EXPERTS, random_model, small_config
from trimtab import RoutingTrace
from trimtab.integrations.transformers import record_routing
from trimtab.renumber.checkpoint import CheckpointFiles, write_renumbered
from trimtab.renumber.expert_tensors import KNOWN_TYPES
from trimtab.trace.numbering import Numbering, random_orders

EXPERTS, GROUPS = 12, 4
# Of a family those that its config has. Nothing but the experts has the size 12.
SIZES: dict[str, Any] = dict.fromkeys(
    ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), EXPERTS
)
SIZES |= dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2)
SIZES |= dict.fromkeys(("n_group", "num_expert_group"), GROUPS)
SIZES |= dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 20)
SIZES |= dict.fromkeys(("intermediate_size", "ffn_hidden_size", "intermediate_size_mlp"), 40)
SIZES |= dict.fromkeys(
    ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"), 24
)
SIZES |= dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "expert_layer_offset"), 0)
SIZES |= dict.fromkeys(("num_hidden_layers", "full_attention_interval", "attn_layer_period", "layer_group_size"), 2)
SIZES |= dict.fromkeys(
    ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim", "mamba_num_heads",
     "mamba_head_dim", "mamba_n_heads", "mamba_d_head", "ssm_state_size", "linear_key_head_dim",
     "linear_value_head_dim", "index_topk"), 8,
)  # fmt: skip
SIZES |= {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "unpadded_vocab_size": 64,
    "q_lora_rank": 16,
    "kv_lora_rank": 16, "topk_group": 2, "moe_layer_end_index": -1, "expert_layer_period": 1, "attn_layer_offset": 1,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "zero_expert_num": 4,
    "index_n_heads": 2, "decoder_sparse_step": 1, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "mamba_expand": 2, "mamba_dt_rank": 4, "mamba_d_state": 4, "mamba_d_conv": 4, "num_layers": 2,
}  # fmt: skip
# Heads of latent attention have no size of their own; of mixed models one layer is of each kind.
_LATENT: dict[str, Any] = {"head_dim": None, "num_key_value_heads": 4}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
         "dots3_note_text"), _LATENT,
    ),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _LATENT | _MIXED),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), _MIXED),
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"num_key_value_heads": 4, "num_hidden_layers": 4},
}  # fmt: skip
FAMILIES = sorted(KNOWN_TYPES & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys())


def tiny_model(model_type: str) -> Any:
    """Random, with nothing left at zero, in float32."""
    made, own = CONFIG_MAPPING[model_type](), OWN.get(model_type, {})
    defaults = made.to_dict()
    sizes = {
        name: value
        for name, value in (SIZES | own).items()
        if value is not None
        and (name in defaults or hasattr(made, name))
        and (name in own or not isinstance(defaults.get(name), list))
    }
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**sizes), dtype=torch.float32)
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            if tensor.is_floating_point() and not tensor.any():
                tensor.normal_()
    return model.eval()


def moe_layers(weights: Mapping[str, torch.Tensor]) -> list[int]:
    """Decoder layers with experts, by the names of a checkpoint."""
    found = (re.search(r"layers\.(\d+)\.(?!\w*att)\w+\.(?:experts|input_linear)\.", name) for name in weights)
    return sorted({int(match[1]) for match in found if match})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_of_a_renumbered_checkpoint(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path / "model")
    layers = moe_layers(load_file(tmp_path / "model" / "model.safetensors"))
    order_LE = random_orders(len(layers), EXPERTS, 5, GROUPS)
    orders = dict(zip(layers, order_LE, strict=True))
    zero_experts = getattr(model.config, "zero_expert_num", None) or 0
    write_renumbered(CheckpointFiles(tmp_path / "model", zero_experts), tmp_path / "new", orders, Numbering())
    assert layers
    renumbered, again = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval() for name in ("new", "model")
    )
    ids = torch.from_numpy(np.random.default_rng(1).integers(3, 60, (2, 17)))
    with torch.no_grad():
        expected, found = again(input_ids=ids).logits, renumbered(input_ids=ids).logits
    assert relative_error(found, expected) < 1e-6
    changed = [
        name for name, tensor in again.state_dict().items() if not torch.equal(tensor, renumbered.state_dict()[name])
    ]
    # Router and experts of each layer.
    assert len(changed) >= 3 * len(layers)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_routes_recorded_before_are_those_recorded_after_mapped(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    random_model(small_config(model_type), torch.float32).save_pretrained(tmp_path / "model")
    layers = np.array(MOE_LAYERS[model_type])
    order_LE = random_orders(len(layers), NUM_EXPERTS, 6, GROUPS)
    numbering = Numbering().then(order_LE, layers)
    orders = dict(zip(layers.tolist(), order_LE, strict=True))
    write_renumbered(CheckpointFiles(tmp_path / "model"), tmp_path / "new", orders, numbering)
    tokens, mask = (
        torch.from_numpy(np.random.default_rng(2).integers(1, 29, (3, 11))),
        torch.ones(3, 11, dtype=torch.int64),
    )
    before, after = (recorded(tmp_path / name, tokens, mask) for name in ("model", "new"))
    mapped = before.in_numbering(Numbering.of_checkpoint(tmp_path / "new"))
    assert np.array_equal(np.sort(mapped.expert_ids), np.sort(after.expert_ids))
    assert not np.array_equal(np.sort(before.expert_ids), np.sort(after.expert_ids))


def recorded(folder: Path, tokens: torch.Tensor, mask: torch.Tensor) -> RoutingTrace:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with record_routing(model) as record, torch.no_grad():
        model(input_ids=tokens, attention_mask=mask)
    return record.trace(tokens, mask)
