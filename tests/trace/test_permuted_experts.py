"""Counts with the experts of every layer in random order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trimtab.trace.permuted_experts import permute_experts


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 12), st.integers(0, 2**32))
def test_every_layer_keeps_its_counts_in_one_other_order(rows: int, layers: int, experts: int, seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 1000, (rows, 2, layers, experts)).astype(np.uint16)
    # Marks every column, to find it again.
    marked = np.concatenate((np.broadcast_to(np.arange(experts, dtype=np.uint16), (1, 2, layers, experts)), counts))
    permuted = permute_experts(marked, seed)
    assert permuted.dtype == counts.dtype
    assert permuted.shape == marked.shape
    order_LE = permuted[0, 0].astype(np.int64)
    for layer in range(layers):
        assert np.array_equal(np.sort(order_LE[layer]), np.arange(experts))
        assert np.array_equal(permuted[..., layer, :], marked[..., layer, :][..., order_LE[layer]])
    assert np.array_equal(permute_experts(marked, seed), permuted)


def test_layers_and_seeds_have_orders_of_their_own() -> None:
    counts = np.tile(np.arange(64), (2, 1))
    first, second = permute_experts(counts, 0), permute_experts(counts, 1)
    assert not np.array_equal(first, counts)
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first, second)
    # A layer's order does not depend on how many layers follow.
    assert np.array_equal(permute_experts(counts[:1], 0), first[:1])
