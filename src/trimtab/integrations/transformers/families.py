"""Supported model families: names of router and expert tensors, expert arithmetic, router weights.

In all families, the `mlp` of an MoE layer has a router, which returns `(logits [T, E], weights [T, K], ids [T, K])`,
and `experts`, which have packed tensors `[E, ...]` and are called with hidden states, ids and weights. Shared experts
and dense layers are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trimtab.errors import InputError
from trimtab.runtime import ExpertWeight, RowGroups, gated_experts, grouped_bias, grouped_linear
from trimtab.runtime.program.grouped_products import ApplyExperts


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        router: attribute of an MoE block that holds the router.
        num_experts: attribute of the config that holds E.
        parameters: names of the expert tensors, in the order that `apply` takes them.
        apply: returns the function that computes the experts of a module.
        router_weights: computes `(config, logits [T, E], ids [T, K])` -> `[T, K]` as the family's router does.
    """

    router: str
    num_experts: str
    parameters: tuple[str, ...]
    apply: Callable[[Any], ApplyExperts]
    router_weights: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def family_of(config: Any) -> Family:
    """The family of a model with this config. Raises InputError, which names the supported types, if there is none."""
    model_type = getattr(config, "model_type", type(config).__name__)
    if model_type not in _FAMILIES:
        raise InputError(f"model type {model_type!r} is not supported; use one of {', '.join(SUPPORTED_MODEL_TYPES)}")
    return _FAMILIES[model_type]


def num_experts(config: Any) -> int:
    """Number of routed experts of an MoE layer, E."""
    return getattr(config, family_of(config).num_experts)


def moe_blocks(model: Any) -> dict[int, Any]:
    """The model's MoE blocks (modules with a router and `experts`), by decoder layer.

    `model` may be a whole model, its decoder, or a wrapper of either with a `config`.

    Raises:
        InputError: if the model's type is not supported, or no layer of it is a MoE layer.
    """
    family_of(model.config)
    blocks = {index: layer.mlp for index, layer in enumerate(decoder_of(model).layers) if hasattr(layer.mlp, "experts")}
    if not blocks:
        raise InputError(f"this {model.config.model_type} model has no MoE layer")
    return blocks


def decoder_of(model: Any) -> Any:
    """The module that runs the decoder layers, which are its `layers`: the model itself, or a part of it.

    Raises:
        InputError: if the model's type is not supported.
    """
    family_of(model.config)
    return next(module for module in model.modules() if isinstance(getattr(module, "layers", None), nn.ModuleList))


def reroute(config: Any, output: Sequence[torch.Tensor], ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The output of the model's router with its choice of experts replaced by `ids`.

    Args:
        config: of the model.
        output: of the router, `(logits [T, E], weights [T, K], ids [T, K])`.
        ids: `[T, K]` int64, the experts to use.
    """
    return output[0], router_weights(config, output[0], ids), ids


def router_weights(config: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Router weights `[T, K]` of the given experts, computed as the model's router does.

    Args:
        config: of the model.
        logits: `[T, E]`, of the router.
        ids: `[T, K]` int64.
    """
    return family_of(config).router_weights(config, logits, ids)


def _softmax_of_all(config: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, ids)
    if config.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype)


def _normalised_softmax(_config: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, ids)
    return weights / weights.sum(dim=-1, keepdim=True)


def _scaled_sigmoid(config: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights without the correction bias, which only affects the choice of experts."""
    weights = logits.sigmoid().gather(1, ids)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * config.routed_scaling_factor


def _softmax_of_chosen(_config: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, ids).softmax(dim=-1, dtype=logits.dtype)


def _gated(experts: Any) -> ApplyExperts:
    return gated_experts(experts.act_fn)


def _clamped(experts: Any) -> ApplyExperts:
    """Experts of GPT-OSS: biases, weights `[G, in, out]`, interleaved and clamped gate and up, and a scaled sigmoid."""
    gain, limit = experts.alpha, experts.limit

    def apply(weights: Sequence[ExpertWeight], rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        gate_up, gate_up_bias, down, down_bias = weights
        both = grouped_bias(grouped_linear(rows, gate_up, groups, transposed=True), gate_up_bias, groups)
        gate = both[:, 0::2].clamp(max=limit)
        up = both[:, 1::2].clamp(-limit, limit)
        inner = gate * torch.sigmoid(gain * gate) * (up + 1)
        return grouped_bias(grouped_linear(inner, down, groups, transposed=True), down_bias, groups)

    return apply


_PACKED = ("gate_up_proj", "down_proj")
_PACKED_WITH_BIASES = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")

_FAMILIES = {
    "qwen3_moe": Family("gate", "num_experts", _PACKED, _gated, _softmax_of_all),
    "mixtral": Family("gate", "num_local_experts", _PACKED, _gated, _normalised_softmax),
    "glm4_moe": Family("gate", "n_routed_experts", _PACKED, _gated, _scaled_sigmoid),
    "deepseek_v3": Family("gate", "n_routed_experts", _PACKED, _gated, _scaled_sigmoid),
    "gpt_oss": Family("router", "num_local_experts", _PACKED_WITH_BIASES, _clamped, _softmax_of_chosen),
}

SUPPORTED_MODEL_TYPES = tuple(_FAMILIES)
