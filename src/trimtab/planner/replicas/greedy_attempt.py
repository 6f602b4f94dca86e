"""One greedy attempt to bring all ranks of an instance to a target load.

The busiest rank (the *giver*) moves tokens of its largest expert to another rank (the *taker*), until no rank is above
the target. The strategy determines the taker and the number of tokens:

* **fit**: of the takers with capacity for the giver's whole excess, the one with the least capacity. Large capacities
  remain for large givers, and few experts are copied twice. (Best fit, as in bin packing.)
* **fill**: the same taker, but filled to the target. The giver may end below it and then becomes a taker with its own
  slots. No capacity is lost to a used slot, so a single slot per rank is nearly always enough.

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


class AttemptState(NamedTuple):
    """Loads and slots while replicas are added one by one.

    Attributes:
        loads_R: `[R]` int64 rows.
        node_loads_N: `[N]` int64 rows.
        jitter: as in `Attempt`.
        at_home_E: `[E]` int64 tokens that are still at home.
        free_slots_R: `[R]` int64.
        given_up_R: `[R]` bool, ranks that can't give more tokens away.
        excluded_R: `[R]` bool, ranks with a copy of the expert that is to be replicated, its home included.
        node_R: `[R]` int64, node of each rank. Looked up rather than divided: this is the innermost part of planning.
    """

    loads_R: Array
    node_loads_N: Array
    jitter: Array
    at_home_E: Array
    free_slots_R: Array
    given_up_R: Array
    excluded_R: Array
    node_R: Array


@kernel
def greedy_attempt(instance, loads_R, limits, attempt, found):  # type: ignore[no-untyped-def]
    """Place replicas until no rank is above the target or no rank can give more.

    Args:
        instance: an `Instance`.
        loads_R: `[R]` int64 rows of every rank without replicas.
        limits: `Limits`.
        attempt: an `Attempt`.
        found: `Shares`, filled.

    Returns:
        The number of replicas and the load of the busiest rank.
    """
    target, jitter = attempt.target, attempt.jitter
    state = _start(instance, loads_R, limits, jitter)
    # Arrays are taken out of named tuples before loops: numba counts references whenever it reads a field.
    loads_R, node_loads_N, node_R, at_home_E = state.loads_R, state.node_loads_N, state.node_R, state.at_home_E
    free_slots_R, given_up_R, excluded_R = state.free_slots_R, state.given_up_R, state.excluded_R
    experts_P, ranks_P, tokens_P = found
    count = 0
    while True:
        giver = NONE
        highest = np.int64(0)
        for r in range(len(loads_R)):
            if loads_R[r] > target and loads_R[r] + jitter[r] > highest and not given_up_R[r]:
                giver = r
                highest = loads_R[r] + jitter[r]
        if giver < 0:
            busiest = np.int64(0)
            for r in range(len(loads_R)):
                busiest = max(busiest, loads_R[r])
            return count, busiest
        expert = _largest_expert(instance.homes, state, giver, limits.smallest_share)
        taker, tokens = NONE, np.int64(0)
        if expert >= 0:
            excluded_R[giver] = True
            for p in range(count):
                if experts_P[p] == expert:
                    excluded_R[ranks_P[p]] = True
            taker, tokens = _taker_and_share(state, limits, attempt, giver, at_home_E[expert])
            for r in range(len(loads_R)):
                excluded_R[r] = False
        if taker < 0 or tokens < limits.smallest_share:
            given_up_R[giver] = True
            continue
        experts_P[count] = expert
        ranks_P[count] = taker
        tokens_P[count] = tokens
        count += 1
        free_slots_R[taker] -= 1
        at_home_E[expert] -= tokens
        loads_R[giver] -= tokens
        loads_R[taker] += tokens
        node_loads_N[node_R[giver]] -= tokens
        node_loads_N[node_R[taker]] += tokens


@kernel
def _start(instance, loads_R, limits, jitter):  # type: ignore[no-untyped-def]
    """The state without replicas."""
    num_ranks = len(loads_R)
    node_loads_N = np.zeros(num_ranks // limits.ranks_per_node, np.int64)
    free_slots_R = np.empty(num_ranks, np.int64)
    node_R = np.empty(num_ranks, np.int64)
    for r in range(num_ranks):
        free_slots_R[r] = limits.slots
        node_R[r] = r // limits.ranks_per_node
        node_loads_N[node_R[r]] += loads_R[r]
    given_up_R, excluded_R = np.zeros(num_ranks, np.bool_), np.zeros(num_ranks, np.bool_)
    return AttemptState(
        loads_R.copy(), node_loads_N, jitter, instance.counts_E.copy(), free_slots_R, given_up_R, excluded_R, node_R
    )


@kernel
def _largest_expert(homes, state, giver, smallest_share):  # type: ignore[no-untyped-def]
    """The giver's expert with most tokens at home; -1 if none has `smallest_share`."""
    experts_by_home, at_home_E, jitter = homes.experts_by_home, state.at_home_E, state.jitter
    expert = NONE
    largest = np.int64(-1)
    first = homes.starts_R[giver]
    for i in range(first, homes.starts_R[giver + 1]):
        tokens = at_home_E[experts_by_home[i]]
        if tokens >= smallest_share and tokens + jitter[i - first] > largest:
            expert = experts_by_home[i]
            largest = tokens + jitter[i - first]
    return expert


@kernel
def _taker_and_share(state, limits, attempt, giver, tokens):  # type: ignore[no-untyped-def]
    """The rank that takes a replica of an expert with `tokens` at home, -1 for none, and the tokens that it takes.

    Neither the share nor the tokens that remain at home are smaller than allowed, unless all tokens move.
    """
    target, strategy, num_ranks = attempt.target, attempt.strategy, len(state.loads_R)
    excess = state.loads_R[giver] - target
    share = max(min(excess, tokens), limits.smallest_share)
    if tokens - share < limits.smallest_share:
        share = tokens
    node = state.node_R[giver]
    near_first = node * limits.ranks_per_node
    near_last = near_first + limits.ranks_per_node
    most_for_whole = target - share
    most_for_part = target - limits.smallest_share
    taker = _pick_rank(state, most_for_whole, near_first, near_last, FULLEST)
    whole = taker >= 0
    if not whole and strategy.near and state.node_loads_N[node] <= target * limits.ranks_per_node:
        taker = _pick_rank(state, most_for_part, near_first, near_last, EMPTIEST)
    if taker < 0:
        taker = _pick_rank(state, most_for_whole, np.int64(0), num_ranks, FULLEST)
        whole = taker >= 0
    if taker < 0:
        taker = _pick_rank(state, most_for_part, np.int64(0), num_ranks, EMPTIEST)
    if taker >= 0 and (strategy.fill or not whole):
        part = target - state.loads_R[taker]
        if not whole:
            part = min(part, excess)
        part = tokens if part >= tokens else min(part, tokens - limits.smallest_share)
        share = max(share, part) if whole else part
    return taker, share


@kernel
def _pick_rank(state, most, first, last, order):  # type: ignore[no-untyped-def]
    """The fullest or emptiest rank in [first, last) with a free slot, at most `most` rows and no copy.

    -1 if there is none.
    """
    loads_R, jitter, free_slots_R, excluded_R = state.loads_R, state.jitter, state.free_slots_R, state.excluded_R
    picked = NONE
    best = np.int64(0)
    for r in range(first, last):
        if loads_R[r] <= most and free_slots_R[r] > 0 and not excluded_R[r]:
            size = order * (loads_R[r] + jitter[r])
            if picked < 0 or size > best:
                picked = r
                best = size
    return picked
