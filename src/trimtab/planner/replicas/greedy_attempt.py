"""One greedy attempt to bring all ranks of an instance to a target load.

The busiest rank (the *giver*) moves tokens of its largest expert to another rank (the *taker*), until no rank is above
the target. The strategy determines the taker and the number of tokens:

* **fit**: of the takers with capacity for the giver's whole excess, the one with the least capacity. Large capacities
  remain for large givers, and few experts are copied twice. (Best fit, as in bin packing.)
* **fill**: the same taker, but filled to the target. The giver may end below it and then becomes a taker with its own
  slots. One slot per rank is enough while givers have an expert with more tokens than the taker has capacity for.

A taker on the giver's node is preferred, since transfers are fast inside a node. With the near strategies it may take
only a part of the excess, unless the whole node is overloaded, because then tokens must leave the node anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner.replicas.kernel_values import PlacementStrategy

# Also constants that kernels pass to each other are int64: numba compiles a kernel once more for each literal.
NONE: Any = np.int64(-1)
# Orders of `_pick_rank`.
FULLEST, EMPTIEST = np.int64(1), np.int64(-1)


class Attempt(NamedTuple):
    """What distinguishes one attempt from another.

    Attributes:
        target: load that no rank should exceed, rows.
        strategy: how takers and shares are chosen.
        jitter: `[max(R, experts of a rank)]` int64, added to loads and shares when ranks and experts are compared.
    """

    target: int
    strategy: PlacementStrategy
    jitter: Array


class Takers(NamedTuple):
    """The ranks that could take a replica.

    Attributes:
        loads_R: `[R]` int64 rows.
        jitter: as in `Attempt`.
        free_slots_R: `[R]` int64.
        excluded_R: `[R]` bool, ranks with a copy of the expert that is to be replicated, its home included.
    """

    loads_R: Array
    jitter: Array
    free_slots_R: Array
    excluded_R: Array


# One kernel, since numba counts a reference for every array that is passed to another: the innermost part of planning.
@kernel
def greedy_attempt(instance, start_loads_R, limits, attempt, found):  # type: ignore[no-untyped-def]
    """Place replicas until no rank is above the target or no rank can give more.

    Args:
        instance: an `Instance`.
        start_loads_R: `[R]` int64 rows of every rank without replicas.
        limits: `Limits`.
        attempt: an `Attempt`.
        found: `Shares`, filled.

    Returns:
        The number of replicas and the load of the busiest rank.
    """
    counts_E, _, (_, experts_by_home, starts_R) = instance
    ranks_per_node, slots, _, smallest_share = limits
    target, strategy, jitter = attempt
    experts_P, ranks_P, tokens_P = found
    num_ranks = len(start_loads_R)
    loads_R = start_loads_R.copy()
    at_home_E = counts_E.copy()
    free_slots_R = np.empty(num_ranks, np.int64)
    given_up_R, excluded_R = np.zeros(num_ranks, np.bool_), np.zeros(num_ranks, np.bool_)
    # Looked up rather than divided.
    node_R = np.empty(num_ranks, np.int64)
    node_loads_N = np.zeros(num_ranks // ranks_per_node, np.int64)
    for r in range(num_ranks):
        free_slots_R[r] = slots
        node_R[r] = r // ranks_per_node
        node_loads_N[node_R[r]] += loads_R[r]
    takers = Takers(loads_R, jitter, free_slots_R, excluded_R)
    count = 0
    while True:
        giver = NONE
        highest = np.int64(0)
        for r in range(num_ranks):
            if loads_R[r] > target and loads_R[r] + jitter[r] > highest and not given_up_R[r]:
                giver = r
                highest = loads_R[r] + jitter[r]
        if giver < 0:
            busiest = np.int64(0)
            for r in range(num_ranks):
                busiest = max(busiest, loads_R[r])
            return count, busiest
        expert = NONE
        largest = np.int64(-1)
        for i in range(starts_R[giver], starts_R[giver + 1]):
            tokens = at_home_E[experts_by_home[i]]
            if tokens >= smallest_share and tokens + jitter[i - starts_R[giver]] > largest:
                expert = experts_by_home[i]
                largest = tokens + jitter[i - starts_R[giver]]
        if expert < 0:
            given_up_R[giver] = True
            continue
        tokens = at_home_E[expert]
        excess = loads_R[giver] - target
        # Neither the share nor the tokens that remain at home are smaller than allowed, unless all tokens move.
        share = max(min(excess, tokens), smallest_share)
        if tokens - share < smallest_share:
            share = tokens
        excluded_R[giver] = True
        for p in range(count):
            if experts_P[p] == expert:
                excluded_R[ranks_P[p]] = True
        node = node_R[giver]
        near_first, near_last = node * ranks_per_node, (node + 1) * ranks_per_node
        taker = _pick_rank(takers, target - share, near_first, near_last, FULLEST)
        whole = taker >= 0
        if not whole and strategy.near and node_loads_N[node] <= target * ranks_per_node:
            taker = _pick_rank(takers, target - smallest_share, near_first, near_last, EMPTIEST)
        if taker < 0:
            taker = _pick_rank(takers, target - share, np.int64(0), num_ranks, FULLEST)
            whole = taker >= 0
        if taker < 0:
            taker = _pick_rank(takers, target - smallest_share, np.int64(0), num_ranks, EMPTIEST)
        for r in range(num_ranks):
            excluded_R[r] = False
        if taker >= 0 and (strategy.fill or not whole):
            part = target - loads_R[taker]
            if not whole:
                part = min(part, excess)
            part = tokens if part >= tokens else min(part, tokens - smallest_share)
            share = max(share, part) if whole else part
        if taker < 0 or share < smallest_share:
            given_up_R[giver] = True
            continue
        experts_P[count] = expert
        ranks_P[count] = taker
        tokens_P[count] = share
        count += 1
        free_slots_R[taker] -= 1
        at_home_E[expert] -= share
        loads_R[giver] -= share
        loads_R[taker] += share
        node_loads_N[node] -= share
        node_loads_N[node_R[taker]] += share


@kernel
def _pick_rank(takers, most, first, last, order):  # type: ignore[no-untyped-def]
    """The fullest or emptiest rank in [first, last) with a free slot, at most `most` rows and no copy.

    -1 if there is none.
    """
    loads_R, jitter, free_slots_R, excluded_R = takers
    picked = NONE
    best = np.int64(0)
    for r in range(first, last):
        if loads_R[r] <= most and free_slots_R[r] > 0 and not excluded_R[r]:
            size = order * (loads_R[r] + jitter[r])
            if picked < 0 or size > best:
                picked = r
                best = size
    return picked
