"""Small random models of every family that the transformers adapter knows, with nothing left at zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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

    def choose(scores: torch.Tensor, k: int, **how: Any) -> Any:
        return (scores.gather(-1, ids), ids) if scores.shape[-1] == NUM_EXPERTS else topk(scores, k, **how)

    def forward_with_choice(hidden: torch.Tensor) -> Any:
        with mock.patch("torch.topk", choose):
            return forward(hidden)

    with mock.patch.object(router, "forward", forward_with_choice):
        yield
