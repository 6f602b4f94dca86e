"""Assigns sequences, in a given order, to the place with the least cost so far."""

from __future__ import annotations

import numpy as np

from trimtab.kernels import kernel

NOWHERE = np.int64(-1)


@kernel
def fill_emptiest(order_N, cost_N, length_N, num_places, token_budget):  # type: ignore[no-untyped-def]
    """A place `[N]` int64 for each sequence; -1 for all if one doesn't fit.

    Args:
        order_N: `[N]` int64 sequences in the order in which they are assigned.
        cost_N: `[N]` int64.
        length_N: `[N]` int64 tokens.
        num_places: number of places; among equals the first is taken.
        token_budget: most tokens of a place.
    """
    place_N = np.full(len(order_N), NOWHERE)
    tokens_P, cost_P = np.zeros(num_places, np.int64), np.zeros(num_places, np.int64)
    # Places as a heap by cost, then by number; `size` of them have not been set aside.
    heap = np.arange(num_places)
    for sequence in order_N:
        size = num_places
        while size > 0 and tokens_P[heap[0]] + length_N[sequence] > token_budget:
            size -= 1
            heap[0], heap[size] = heap[size], heap[0]
            _sift_down(heap, size, cost_P)
        if size == 0:
            place_N[:] = NOWHERE
            return place_N
        place = heap[0]
        place_N[sequence] = place
        tokens_P[place] += length_N[sequence]
        cost_P[place] += cost_N[sequence]
        _sift_down(heap, size, cost_P)
        for last in range(size, num_places):
            _sift_up(heap, last, cost_P)
    return place_N


@kernel
def _is_before(cost_P, a, b):  # type: ignore[no-untyped-def]
    return cost_P[a] < cost_P[b] or (cost_P[a] == cost_P[b] and a < b)


@kernel
def _sift_down(heap, size, cost_P):  # type: ignore[no-untyped-def]
    """Move the first of `size` places down to where it belongs."""
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _is_before(cost_P, heap[child + 1], heap[child]):
            child += 1
        if not _is_before(cost_P, heap[child], heap[at]):
            return
        heap[at], heap[child] = heap[child], heap[at]
        at = child


@kernel
def _sift_up(heap, at, cost_P):  # type: ignore[no-untyped-def]
    """Move a place up to where it belongs."""
    while at > 0 and _is_before(cost_P, heap[at], heap[(at - 1) // 2]):
        heap[at], heap[(at - 1) // 2] = heap[(at - 1) // 2], heap[at]
        at = (at - 1) // 2
