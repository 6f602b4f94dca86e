"""Hugging Face transformers: run a model's experts in a `Session`, record and replay its routing.

Knows the packed experts of Qwen3-MoE (`gate_up_proj [E, 2 * I, H]`, `down_proj [E, H, I]`) and its router.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from trimtab.errors import InputError
from trimtab.runtime import ExpertLayer, Session, gated_experts
from trimtab.trace import id_dtype
from trimtab.trace.routing import Array

SUPPORTED_MODEL_TYPES = ("qwen3_moe",)


def moe_blocks(model: Any) -> dict[int, Any]:
    """The model's MoE blocks (modules with `gate` and `experts`), by decoder layer.

    Raises:
        InputError: if the model's type is not supported, or no layer of it is a MoE layer.
    """
    model_type = getattr(model.config, "model_type", type(model).__name__)
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise InputError(f"model type {model_type!r} is not supported; use one of {', '.join(SUPPORTED_MODEL_TYPES)}")
    blocks = {
        index: layer.mlp
        for index, layer in enumerate(model.get_submodule("model.layers").children())
        if hasattr(layer.mlp, "experts")
    }
    if not blocks:
        raise InputError(f"this {model_type} model has no MoE layer")
    return blocks


def share_experts(model: nn.Module, session: Session) -> None:
    """Keep this rank's home experts of a whole model, and run every MoE block in the session, with routing replay.

    Expert parameters stay where they were in the module tree, now `[E / R, ...]`. Not a collective.
    """
    home = torch.from_numpy(session.home_experts)
    for block in moe_blocks(model).values():
        experts: Any = block.experts
        for name in ("gate_up_proj", "down_proj"):
            whole = getattr(experts, name)
            setattr(experts, name, nn.Parameter(whole.detach()[home.to(whole.device)].clone()))
        layer = session.add_layer([experts.gate_up_proj, experts.down_proj], gated_experts(experts.act_fn))
        experts.forward = layer
        block.gate.register_forward_hook(partial(_replay, session, layer))


def replicated_parameters(model: nn.Module, session: Session) -> list[nn.Parameter]:
    """The parameters that every rank holds: all but the experts."""
    sharded = {id(parameter) for layer in session.layers for parameter in layer.parameters}
    return [parameter for parameter in model.parameters() if id(parameter) not in sharded]


def _replay(session: Session, layer: ExpertLayer, gate: nn.Module, _args: Any, output: Any) -> Any:
    logits, weights, live_ids = output
    ids = layer.route(live_ids)
    return logits, router_weights(gate, logits, ids) if session.replays else weights, ids


def router_weights(gate: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Qwen3-MoE's weights for given experts: softmax in float32 over all, gather, normalise if the model does."""
    weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, ids)
    if gate.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype)


class RoutingRecord:
    """What the routers of a model chose while it ran, call by call."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._dtype = id_dtype(num_experts)
        self._calls_L: list[list[Array]] = [[] for _ in range(num_layers)]

    def by_sequence(self, batch: int) -> Array:
        """`[batch, t, L, K]` ids, calls joined along t. Every call must have had the same number of sequences."""
        layers = [
            np.concatenate([ids.reshape(batch, -1, ids.shape[-1]) for ids in calls], axis=1) for calls in self._calls_L
        ]
        return np.stack(layers, axis=2)

    def _add(self, layer: int, _gate: nn.Module, _args: Any, output: Any) -> None:
        self._calls_L[layer].append(output[2].cpu().numpy().astype(self._dtype))


@contextmanager
def record_routing(model: Any) -> Iterator[RoutingRecord]:
    """Record the routing of a whole model (not one in a session) during `generate` or forward calls."""
    blocks = moe_blocks(model)
    record = RoutingRecord(len(blocks), model.config.num_experts)
    hooks = [
        block.gate.register_forward_hook(partial(record._add, layer)) for layer, block in enumerate(blocks.values())
    ]
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()
