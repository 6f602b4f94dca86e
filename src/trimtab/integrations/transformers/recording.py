"""Record what a model's routers choose while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from trimtab.integrations.transformers.families import family_of, moe_blocks, num_experts
from trimtab.trace import id_dtype
from trimtab.trace.routing import Array


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

    def _add(self, layer: int, _router: nn.Module, _args: Any, output: Any) -> None:
        self._calls_L[layer].append(output[2].cpu().numpy().astype(self._dtype))


@contextmanager
def record_routing(model: Any) -> Iterator[RoutingRecord]:
    """Record the routing of a model during `generate` or forward calls.

    A model in a session is recorded as it ran: with the routing that was replayed.
    """
    blocks = moe_blocks(model)
    router = family_of(model.config).router
    record = RoutingRecord(len(blocks), num_experts(model.config))
    hooks = [
        getattr(block, router).register_forward_hook(partial(record._add, layer))
        for layer, block in enumerate(blocks.values())
    ]
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()
