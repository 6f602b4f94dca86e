"""One greedy attempt to bring all ranks of an instance to a target load.

The busiest rank (the *giver*) moves tokens of its largest expert to another rank (the *taker*), until no rank is above
the target. There are two ways to choose the taker and the number of tokens:

* **fit**: of the takers with capacity for the giver's whole excess, the one with the least capacity. Large capacities
  remain for large givers, and few experts are copied twice. (Best fit, as in bin packing.)
* **fill**: the same taker, but filled to the target. The giver may end below it and then becomes a taker with its own
  slots. One slot per rank is enough while givers have an expert with more tokens than the taker has capacity for.

A taker on the giver's node is preferred, since transfers are fast inside a node. It may take only a part of the excess,
unless the whole node is overloaded, because then tokens must leave the node anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel

# Also constants that kernels pass to each other are int64: numba compiles a kernel once more for each literal.
NONE: Any = np.int64(-1)
# Orders of `_pick_rank`.
FULLEST, EMPTIEST = np.int64(1), np.int64(-1)


class Takers(NamedTuple):
    """The ranks that could take a replica.

    Attributes:
        loads_R: `[R]` int64 rows.
        free_slots_R: `[R]` int64.
        excluded_R: `[R]` bool, ranks with a copy of the expert that is to be replicated, its home included.
    """

    loads_R: Array
    free_slots_R: Array
    excluded_R: Array


# One kernel, since numba counts a reference for every array that is passed to another: the innermost part of planning.
@kernel
def greedy_attempt(instance, start_loads_R, limits, target, fill, found):  # type: ignore[no-untyped-def]
    """Place replicas until no rank is above the target or no rank can give more.

    Args:
        instance: an `InstanceRows`.
        start_loads_R: `[R]` int64 rows of every rank without replicas.
        limits: `Limits`.
        target: load that no rank should exceed, rows.
        fill: whether takers are filled to the target; else they take only the giver's excess.
        found: `Shares`, filled.

    Returns:
        The number of replicas and the load of the busiest rank.
    """
    counts_E, _, (_, experts_by_home, starts_R) = instance
    ranks_per_node, reach = limits.ranks_per_node, limits.reach
    slots, smallest_share = limits.slots, limits.smallest_share
    experts_P, ranks_P, tokens_P = found
    num_ranks = len(start_loads_R)
    loads_R = start_loads_R.copy()
    at_home_E = counts_E.copy()
    free_slots_R = np.empty(num_ranks, np.int64)
    given_up_R, excluded_R = np.zeros(num_ranks, np.bool_), np.zeros(num_ranks, np.bool_)
    # Looked up rather than divided.
    node_R = np.empty(num_ranks, np.int64)
    node_loads_N = np.zeros(num_ranks // ranks_per_node, np.int64)
    # The highest load of each node's possible givers, so that not all ranks are compared every time.
    highest_N = np.zeros(num_ranks // ranks_per_node, np.int64)
    for r in range(num_ranks):
        free_slots_R[r] = slots
        node_R[r] = r // ranks_per_node
        node_loads_N[node_R[r]] += loads_R[r]
        if loads_R[r] > target:
            highest_N[node_R[r]] = max(highest_N[node_R[r]], loads_R[r])
    takers = Takers(loads_R, free_slots_R, excluded_R)
    # Ranks that can take a smallest share, ascending.
    open_N = np.empty(num_ranks, np.int64)
    num_open = np.int64(0)
    for r in range(num_ranks):
        if slots > 0 and loads_R[r] <= target - smallest_share:
            open_N[num_open] = r
            num_open += 1
    # Replicas of one expert form a chain, the last one first.
    last_E, before_P = np.full(len(counts_E), NONE), np.empty(len(experts_P), np.int64)
    count = 0
    while True:
        giver, node = NONE, np.int64(0)
        for n in range(len(highest_N)):
            if highest_N[n] > highest_N[node]:
                node = np.int64(n)
        near_first, near_last = node * ranks_per_node, (node + 1) * ranks_per_node
        if highest_N[node] > 0:
            for r in range(near_first, near_last):
                if loads_R[r] > target and loads_R[r] == highest_N[node] and not given_up_R[r]:
                    giver = np.int64(r)
                    break
        if giver < 0:
            busiest = np.int64(0)
            for r in range(num_ranks):
                busiest = max(busiest, loads_R[r])
            return count, busiest
        expert = NONE
        largest = np.int64(-1)
        for i in range(starts_R[giver], starts_R[giver + 1]):
            tokens = at_home_E[experts_by_home[i]]
            if tokens >= smallest_share and tokens > largest:
                expert, largest = experts_by_home[i], tokens
        taker, share = NONE, np.int64(0)
        if expert >= 0:
            tokens = at_home_E[expert]
            excess = loads_R[giver] - target
            # Neither the share nor the tokens that remain at home are smaller than allowed, unless all tokens move.
            share = max(min(excess, tokens), smallest_share)
            if tokens - share < smallest_share:
                share = tokens
            excluded_R[giver] = True
            p = last_E[expert]
            while p >= 0:
                excluded_R[ranks_P[p]] = True
                p = before_P[p]
            taker = _pick_rank(takers, target - share, near_first, near_last, FULLEST)
            whole = taker >= 0
            if not whole and node_loads_N[node] <= target * ranks_per_node:
                taker = _pick_rank(takers, target - smallest_share, near_first, near_last, EMPTIEST)
            far_first = giver // reach * reach
            if taker < 0:
                fullest, emptiest = NONE, NONE
                for i in range(num_open):
                    r = open_N[i]
                    if r < far_first or r >= far_first + reach or excluded_R[r]:
                        continue
                    if emptiest < 0 or loads_R[r] < loads_R[emptiest]:
                        emptiest = r
                    if loads_R[r] <= target - share and (fullest < 0 or loads_R[r] > loads_R[fullest]):
                        fullest = r
                whole = fullest >= 0
                taker = fullest if whole else emptiest
            excluded_R[giver] = False
            p = last_E[expert]
            while p >= 0:
                excluded_R[ranks_P[p]] = False
                p = before_P[p]
            if taker >= 0 and (fill or not whole):
                part = target - loads_R[taker]
                if not whole:
                    part = min(part, excess)
                part = tokens if part >= tokens else min(part, tokens - smallest_share)
                share = max(share, part) if whole else part
        if taker < 0 or share < smallest_share:
            given_up_R[giver] = True
        else:
            experts_P[count] = expert
            ranks_P[count] = taker
            tokens_P[count] = share
            before_P[count] = last_E[expert]
            last_E[expert] = count
            count += 1
            free_slots_R[taker] -= 1
            at_home_E[expert] -= share
            loads_R[giver] -= share
            loads_R[taker] += share
            node_loads_N[node] -= share
            node_loads_N[node_R[taker]] += share
            if free_slots_R[taker] == 0 or loads_R[taker] > target - smallest_share:
                num_open = _take_out(open_N, num_open, taker)
            if free_slots_R[giver] > 0 and loads_R[giver] <= target - smallest_share:
                num_open = _put_in(open_N, num_open, giver)
        # A taker ends at the target at most, so only the giver's node has other givers.
        highest_N[node] = 0
        for r in range(near_first, near_last):
            if loads_R[r] > target and not given_up_R[r]:
                highest_N[node] = max(highest_N[node], loads_R[r])


@kernel
def _pick_rank(takers, most, first, last, order):  # type: ignore[no-untyped-def]
    """The fullest or emptiest rank in [first, last) with a free slot, at most `most` rows and no copy.

    -1 if there is none.
    """
    loads_R, free_slots_R, excluded_R = takers
    picked = NONE
    best = np.int64(0)
    for r in range(first, last):
        if loads_R[r] <= most and free_slots_R[r] > 0 and not excluded_R[r]:
            size = order * loads_R[r]
            if picked < 0 or size > best:
                picked = r
                best = size
    return picked


@kernel
def _take_out(values_N, number, value):  # type: ignore[no-untyped-def]
    """Remove a value from the first `number`, which ascend; returns how many are left."""
    i = np.searchsorted(values_N[:number], value)
    if i == number or values_N[i] != value:
        return number
    for j in range(i + 1, number):
        values_N[j - 1] = values_N[j]
    return number - 1


@kernel
def _put_in(values_N, number, value):  # type: ignore[no-untyped-def]
    """Add a value to the first `number`, which ascend, if it is not there; returns how many there are."""
    i = number
    while i > 0 and values_N[i - 1] > value:
        i -= 1
    if i > 0 and values_N[i - 1] == value:
        return number
    for j in range(number, i, -1):
        values_N[j] = values_N[j - 1]
    values_N[i] = value
    return number + 1
