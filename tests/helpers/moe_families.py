"""Small random models of every family that the transformers adapter knows, with nothing left at zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
)

NUM_EXPERTS = 8
TOP_K = 3
# The vocabulary is that of the tokenizer of `recipes.rl.task`.
_COMMON: dict[str, Any] = {
    "vocab_size": 30, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "intermediate_size": 48, "num_experts_per_tok": TOP_K, "initializer_range": 0.2,
    "bos_token_id": None, "pad_token_id": 0, "eos_token_id": 29,
}  # fmt: skip
_SIGMOID_ROUTER: dict[str, Any] = {
    "n_routed_experts": NUM_EXPERTS, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
}  # fmt: skip
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": NUM_EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": True, "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": NUM_EXPERTS},
    "glm4_moe": _SIGMOID_ROUTER | {"n_shared_experts": 2},
    "deepseek_v3": _SIGMOID_ROUTER | {
        "num_key_value_heads": 2, "head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 16,
    },
    # Both limits are reached, and sequences are longer than the window.
    "gpt_oss": {"num_local_experts": NUM_EXPERTS, "swiglu_limit": 0.5, "sliding_window": 4},
}  # fmt: skip
MODEL_TYPES = tuple(_OF_FAMILY)
MOE_LAYERS = {
    "qwen3_moe": [0, 2], "mixtral": [0, 1, 2], "glm4_moe": [1, 2], "deepseek_v3": [1, 2], "gpt_oss": [0, 1, 2],
}  # fmt: skip


def small_config(model_type: str, **changes: Any) -> Any:
    """Three layers, eight experts, top-3."""
    return AutoConfig.for_model(model_type, **(_COMMON | _OF_FAMILY[model_type] | changes))


# Sizes of any text model, by the names that families have for them.
_ANY: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), NUM_EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), TOP_K),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_interval", "num_dense_layers", "n_shared_experts"), 1),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads", "index_n_heads", "mamba_expand"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_head_dim", "mamba_d_state"), 8),
    "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "max_position_embeddings": 64,
    "mlp_only_layers": [], "moe_layer_start_index": 0, "moe_layer_end_index": 2, "num_shared_experts": 1,
    "sliding_window": 4,
    "mamba_n_heads": 4, "mamba_d_head": 16, "index_topk": 4,
}  # fmt: skip


def any_model(model_type: str) -> Any:
    """A small random model of any family in float32, whatever the names of its sizes are."""
    kind = type(CONFIG_MAPPING[model_type]().get_text_config())
    default = kind()
    sizes = {
        name: value for name, value in (_COMMON | {"num_key_value_heads": 2} | _ANY).items() if hasattr(default, name)
    }
    if kinds := getattr(default, "layer_types", None):
        sizes["layer_types"] = (list(dict.fromkeys(kinds))[:3] * 3)[:3]
    if getattr(default, "mlp_layer_types", None):
        sizes["mlp_layer_types"] = ["dense", "sparse", "sparse"]
    config, how = kind(**sizes), {"dtype": torch.float32, "experts_implementation": "eager"}
    is_causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING
    model: Any = (AutoModelForCausalLM if is_causal else AutoModel).from_config(config, **how)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith("bias"):
                parameter.normal_(std=0.2)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def random_model(config: Any, dtype: torch.dtype) -> Any:
    """From torch's current seed. Experts are computed one by one, as grouped products don't take float64."""
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("bias"):
                tensor.normal_(std=0.2)
    return model


def router_of(block: Any) -> Any:
    return block.router if hasattr(block, "router") else block.gate


@contextmanager
def all_chosen(model: Any, ids_NLK: torch.Tensor) -> Iterator[None]:
    """Make all routers of a model choose these experts."""
    routers = [router_of(layer.mlp) for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    with ExitStack() as stack:
        for layer, router in enumerate(routers):
            stack.enter_context(chosen(router, ids_NLK[:, layer]))
        yield


@contextmanager
def chosen(router: Any, ids: torch.Tensor) -> Iterator[None]:
    """Make a router choose these experts, and do all else itself: its choice is a `torch.topk` over experts."""
    forward, topk = router.forward, torch.topk

    def choose(scores: torch.Tensor, k: int, *how: Any, **named: Any) -> Any:
        if scores.shape[-1] == NUM_EXPERTS and k == TOP_K:
            return torch.return_types.topk((scores.gather(-1, ids), ids))
        return topk(scores, k, *how, **named)

    def forward_with_choice(*hidden: Any, **named: Any) -> Any:
        with mock.patch("torch.topk", choose), mock.patch.object(torch.Tensor, "topk", choose):
            return forward(*hidden, **named)

    with mock.patch.object(router, "forward", forward_with_choice):
        yield
