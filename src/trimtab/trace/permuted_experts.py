"""`permute_experts`: token counts as if the experts of every layer had their ids in random order.

Contiguous homes put neighbouring ids on one rank. If hot experts have neighbouring ids, a rank is busier than in a
model whose hot experts lie anywhere. A random order shows how much of the imbalance comes from the ids.
"""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array


def permute_experts(counts: Array, seed: int) -> Array:
    """Counts `[..., L, E]` with the experts of every layer in another random order; same dtype.

    All leading indices of a layer, such as sequences or micro-steps, get the same order.
    """
    num_layers, num_experts = counts.shape[-2:]
    rng = np.random.default_rng(seed)
    permuted = np.empty_like(counts)
    for layer in range(num_layers):
        permuted[..., layer, :] = counts[..., layer, rng.permutation(num_experts)]
    return permuted
