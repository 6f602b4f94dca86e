"""Replicas by incremental greedy: tokens are shifted between copies, and a copy is added if that is not enough.

Used by ReLibra and ForeMoE, whose own heuristics are not public.
"""

from __future__ import annotations

import math

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner import Placement, StepPlan
from trimtab.policies.policy import View
from trimtab.policies.rivals.shares import split_shares


def plan_greedily(
    view: View, placement: Placement, *, within_node: bool, threshold: float, smallest_share: int
) -> StepPlan:
    """Replicas for every instance of a step at given homes; see `replicate`."""
    cluster = view.cluster

    def plan_one(_: int, counts_RE: Array, home_E: Array) -> tuple[Array, Array]:
        return replicate(
            counts_RE,
            home_E,
            ranks_per_node=cluster.ranks_per_node,
            within_node=within_node,
            slots=cluster.slots_per_rank,
            threshold=threshold,
            smallest_share=smallest_share,
        )

    return view.plan_instances(plan_one, placement=placement, slots=cluster.slots_per_rank)


def replicate(
    counts_RE: Array,
    home_E: Array,
    *,
    ranks_per_node: int,
    within_node: bool,
    slots: int,
    threshold: float,
    smallest_share: int,
) -> tuple[Array, Array]:
    """Replicas `[P, 2]` (expert, rank) of one instance and their quotas `[P, R]`, both int64.

    Args:
        counts_RE: `[R, E]` int64 tokens by source rank and expert.
        home_E: `[E]` int64 home ranks.
        within_node: replicas stay in the node of their home. Ranks are then reduced only to the mean load of the
            busiest node's ranks, a lower bound of the layer.
        threshold: target max/mean load.
        smallest_share: fewest tokens of a replica.
    """
    num_ranks = len(counts_RE)
    counts_E = counts_RE.sum(axis=0)
    domain = ranks_per_node if within_node else num_ranks
    loads_R = np.bincount(home_E, counts_E, num_ranks)
    level = loads_R.reshape(-1, domain).sum(axis=1).max() / domain
    target = math.ceil(max(loads_R.mean() * threshold, level))
    replicas_3P = np.empty((3, num_ranks * slots), np.int64)
    count = add_replicas(
        counts_E, home_E, num_ranks, ranks_per_node, domain, slots, target, smallest_share, replicas_3P
    )
    used_3P = replicas_3P[:, :count]
    return split_shares(counts_RE, home_E, ranks_per_node, used_3P[:, used_3P[2] > 0].copy())


@kernel
def add_replicas(  # type: ignore[no-untyped-def]
    counts_E, home_E, num_ranks, ranks_per_node, ranks_per_domain, slots, target, smallest_share, replicas_3P
):
    """Reduce the loads of the busiest ranks to `target`, one rank and one move at a time.

    The busiest rank moves tokens to another copy of one of its experts, on a rank below the target. Without such a
    copy, its largest expert gets a copy on the emptiest rank of the domain, in the same node if a rank there has as
    much capacity. If the ranks with free slots are full, one of them first moves tokens to other ranks.

    Args:
        counts_E, home_E: `[E]` int64.
        ranks_per_domain: neighbouring ranks among which replicas go.
        target: load up to which a rank is not changed, tokens.
        smallest_share: fewest tokens of a replica.
        replicas_3P: `[3, R * slots]` int64, filled with expert, rank and tokens of every replica. A replica may end
            with no tokens.

    Returns:
        The number of replicas.
    """
    loads = np.zeros(num_ranks, np.int64)
    for e in range(len(counts_E)):
        loads[home_E[e]] += counts_E[e]
    at_home_E = counts_E.copy()
    free = np.full(num_ranks, slots, np.int64)
    stuck = np.zeros(num_ranks, np.bool_)
    state = (counts_E, home_E, at_home_E, loads, free, smallest_share, replicas_3P)
    count = 0
    for _ in range(64 * num_ranks):
        giver = -1
        for r in range(num_ranks):
            if loads[r] > target and not stuck[r] and (giver < 0 or loads[r] > loads[giver]):
                giver = r
        if giver < 0:
            break
        if _shift(giver, target, state, count):
            continue
        if _add(giver, target, ranks_per_node, ranks_per_domain, state, count):
            count += 1
        elif not _make_room(giver, target, ranks_per_domain, state, count):
            stuck[giver] = True
    return count


@kernel
def _shift(giver, target, state, count):  # type: ignore[no-untyped-def]
    """Move tokens to a copy on the emptiest rank below the target that has one of the experts. False if there is
    none."""
    _, home_E, at_home_E, loads, _, smallest_share, replicas_3P = state
    # Of the two copies: -1 is the home, -2 means none found.
    source, taker, tokens = -2, -2, np.int64(0)
    lowest = target
    for p in range(count):
        e, rank = replicas_3P[0, p], replicas_3P[1, p]
        if home_E[e] == giver and at_home_E[e] > 0 and loads[rank] < lowest:
            source, taker, tokens, lowest = -1, p, at_home_E[e], loads[rank]
        if rank != giver or replicas_3P[2, p] == 0:
            continue
        if loads[home_E[e]] < lowest:
            source, taker, tokens, lowest = p, -1, replicas_3P[2, p], loads[home_E[e]]
        for q in range(count):
            if q != p and replicas_3P[0, q] == e and loads[replicas_3P[1, q]] < lowest:
                source, taker, tokens, lowest = p, q, replicas_3P[2, p], loads[replicas_3P[1, q]]
    if source == -2:
        return False
    wanted = min(loads[giver] - target, target - lowest, tokens)
    if source >= 0 and 0 < tokens - wanted < smallest_share:
        wanted = tokens - smallest_share
    if wanted < (smallest_share if taker >= 0 and replicas_3P[2, taker] == 0 else 1):
        return False
    e = replicas_3P[0, max(source, taker)]
    if source >= 0:
        replicas_3P[2, source] -= wanted
    else:
        at_home_E[e] -= wanted
    if taker >= 0:
        replicas_3P[2, taker] += wanted
        loads[replicas_3P[1, taker]] += wanted
    else:
        at_home_E[e] += wanted
        loads[home_E[e]] += wanted
    loads[giver] -= wanted
    return True


@kernel
def _add(giver, target, ranks_per_node, ranks_per_domain, state, count):  # type: ignore[no-untyped-def]
    """A new replica of one of the giver's experts, written at `count`. False if no rank can take one."""
    _, home_E, at_home_E, loads, free, smallest_share, replicas_3P = state
    first = giver // ranks_per_domain * ranks_per_domain
    best, near = -1, -1
    for r in range(first, first + ranks_per_domain):
        if free[r] > 0 and loads[r] < target:
            if best < 0 or loads[r] < loads[best]:
                best = r
            if r // ranks_per_node == giver // ranks_per_node and (near < 0 or loads[r] < loads[near]):
                near = r
    if best < 0:
        return False
    excess = loads[giver] - target
    taker = near if near >= 0 and target - loads[near] >= min(excess, target - loads[best]) else best
    wanted = min(excess, target - loads[taker])
    expert, source, tokens = -1, -1, np.int64(0)
    for e in range(len(home_E)):
        if home_E[e] == giver and at_home_E[e] > tokens and not _has_copy(e, taker, replicas_3P, count):
            expert, source, tokens = e, -1, at_home_E[e]
    for p in range(count):
        e = replicas_3P[0, p]
        if replicas_3P[1, p] == giver and replicas_3P[2, p] > tokens and home_E[e] != taker:  # noqa: SIM102
            if not _has_copy(e, taker, replicas_3P, count):
                expert, source, tokens = e, p, replicas_3P[2, p]
    wanted = min(wanted, tokens)
    if source >= 0 and 0 < tokens - wanted < smallest_share:
        wanted = tokens - smallest_share
    if wanted < max(smallest_share, 1):
        return False
    if source >= 0:
        replicas_3P[2, source] -= wanted
    else:
        at_home_E[expert] -= wanted
    replicas_3P[0, count], replicas_3P[1, count], replicas_3P[2, count] = expert, taker, wanted
    loads[giver] -= wanted
    loads[taker] += wanted
    free[taker] -= 1
    return True


@kernel
def _make_room(giver, target, ranks_per_domain, state, count):  # type: ignore[no-untyped-def]
    """On a rank with a free slot, move tokens of its own experts to a copy on a rank below the target, as many as the
    giver's excess. False if no rank can free a smallest share."""
    _, home_E, at_home_E, loads, free, smallest_share, replicas_3P = state
    first = giver // ranks_per_domain * ranks_per_domain
    chosen, most = -1, np.int64(0)
    for p in range(count):
        e, rank = replicas_3P[0, p], replicas_3P[1, p]
        if home_E[e] == giver or not first <= rank < first + ranks_per_domain or free[home_E[e]] == 0:
            continue
        room = min(at_home_E[e], target - loads[rank], loads[giver] - target)
        if room > most and loads[home_E[e]] - room < target:
            chosen, most = p, room
    if most < max(smallest_share, 1):
        return False
    e = replicas_3P[0, chosen]
    replicas_3P[2, chosen] += most
    at_home_E[e] -= most
    loads[replicas_3P[1, chosen]] += most
    loads[home_E[e]] -= most
    return True


@kernel
def _has_copy(expert, rank, replicas_3P, count):  # type: ignore[no-untyped-def]
    for p in range(count):  # noqa: SIM110 (numba has no generators in `any`)
        if replicas_3P[0, p] == expert and replicas_3P[1, p] == rank:
            return True
    return False
