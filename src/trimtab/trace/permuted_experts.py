"""Token counts, or a trace, as if the experts of every layer had their ids in random order.

Contiguous homes put neighbouring ids on one rank. If hot experts have neighbouring ids, a rank is busier than in a
model whose hot experts lie anywhere. A random order shows how much of the imbalance comes from the ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from trimtab.array_type import Array
from trimtab.trace.routing import RoutingTrace


def permute_experts(counts: Array, seed: int, groups: int = 1) -> Array:
    """Counts `[..., L, E]` with the experts of every layer in another random order; same dtype.

    All leading indices of a layer, such as sequences or micro-steps, get the same order. Experts of a group, as in
    `ModelSpec.expert_groups`, stay together.
    """
    permuted = np.empty_like(counts)
    for layer, order in enumerate(_orders(counts.shape[-2], counts.shape[-1], seed, groups)):
        permuted[..., layer, :] = counts[..., layer, order]
    return permuted


def permute_trace(trace: RoutingTrace, seed: int, groups: int = 1) -> RoutingTrace:
    """The trace with the experts of every layer in the order that `permute_experts` gives its counts."""
    permuted = np.empty_like(trace.expert_ids)
    for layer, order in enumerate(_orders(trace.num_layers, trace.num_experts, seed, groups)):
        new_E = np.full(trace.no_route + 1, trace.no_route, permuted.dtype)
        new_E[order] = np.arange(trace.num_experts)
        permuted[:, layer] = new_E[trace.expert_ids[:, layer]]
    return replace(trace, expert_ids=permuted)


def _orders(num_layers: int, num_experts: int, seed: int, groups: int) -> Iterator[Array]:
    rng = np.random.default_rng(seed)
    for _ in range(num_layers):
        if groups == 1:
            yield rng.permutation(num_experts)
        else:
            experts_GN = rng.permuted(np.arange(num_experts).reshape(groups, -1), axis=1)
            yield experts_GN[rng.permutation(groups)].ravel()
