"""Replicas by incremental greedy: tokens are shifted between copies, and a copy is added if that is not enough.

Used for ReLibra and ForeMoE, whose own heuristics are not public.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec
from trimtab.kernels import kernel
from trimtab.planner import Placement, StepPlan
from trimtab.policies.policy import View
from trimtab.policies.rivals.instance_load import InstanceLoad, split_shares


def plan_greedily(
    view: View, placement: Placement, *, within_node: bool, threshold: float, smallest_share: int
) -> StepPlan:
    """Replicas for every instance of a step at given homes; see `replicate`."""

    def plan_one(_: int, counts_RE: Array, home_E: Array) -> tuple[Array, Array]:
        return replicate(
            counts_RE,
            home_E,
            view.cluster,
            within_node=within_node,
            threshold=threshold,
            smallest_share=smallest_share,
        )

    return view.plan_instances(plan_one, placement=placement, slots=view.cluster.slots_per_rank)


def replicate(
    counts_RE: Array, home_E: Array, cluster: ClusterSpec, *, within_node: bool, threshold: float, smallest_share: int
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
    load = InstanceLoad.of(counts_RE.sum(axis=0), home_E, cluster, within_node=within_node)
    busiest_domain = load.loads_R.reshape(-1, load.ranks_per_domain).sum(axis=1).max() / load.ranks_per_domain
    target = math.ceil(max(load.loads_R.mean() * threshold, busiest_domain))
    replicas_3P = add_replicas(load, target, smallest_share)
    return split_shares(counts_RE, load, replicas_3P[:, replicas_3P[2] > 0])


def add_replicas(load: InstanceLoad, target: int, smallest_share: int) -> Array:
    """Reduce the loads of the busiest ranks to `target`, one rank and one move at a time.

    Args:
        load: tokens with all experts at home.
        target: load up to which a rank is not changed, tokens.
        smallest_share: fewest tokens of a replica.

    Returns:
        `[3, P]` int64, expert, rank and tokens of every replica, in the order in which they were added. A replica may
        have no tokens.
    """
    replicas_3P = np.empty((3, len(load.loads_R) * load.slots), np.int64)
    free_R = np.full(len(load.loads_R), load.slots)
    split = _Split(load.counts_E.copy(), load.loads_R.copy(), free_R, replicas_3P)
    return replicas_3P[:, : _add_replicas(load, target, smallest_share, split)]


class _Split(NamedTuple):
    """The current split of one instance, changed by the kernels.

    Attributes:
        at_home_E: `[E]` int64, tokens that the homes compute.
        loads_R: `[R]` int64, tokens of every rank.
        free_R: `[R]` int64, slots without a replica.
        replicas_3P: `[3, R * slots]` int64, expert, rank and tokens of every replica.
    """

    at_home_E: Array
    loads_R: Array
    free_R: Array
    replicas_3P: Array


@kernel
def _add_replicas(load, target, smallest_share, split):  # type: ignore[no-untyped-def]
    """Returns the number of replicas.

    The busiest rank moves tokens to another copy of one of its experts, on a rank below the target. Without such a
    copy, its largest expert gets a copy on the emptiest rank of the domain, in the same node if a rank there has as
    much capacity. If the ranks with free slots are full, one of them first moves tokens to other ranks.
    """
    loads_R = split.loads_R
    stuck_R = np.zeros(len(loads_R), np.bool_)
    count = np.int64(0)
    for _ in range(64 * len(loads_R)):
        giver = np.int64(-1)
        for r in range(len(loads_R)):
            if loads_R[r] > target and not stuck_R[r] and (giver < 0 or loads_R[r] > loads_R[giver]):
                giver = np.int64(r)
        if giver < 0:
            break
        limits = (giver, target, smallest_share)
        if _shift(load, limits, split, count):
            continue
        if _add(load, limits, split, count):
            count += 1
        elif not _make_room(load, limits, split, count):
            stuck_R[giver] = True
    return count


@kernel
def _shift(load, limits, split, count):  # type: ignore[no-untyped-def]
    """Move tokens of a rank to a copy on the emptiest rank below the target that has one of its experts. Returns
    whether there is one."""
    giver, target, smallest_share = limits
    home_E, at_home_E, loads_R, replicas_3P = load.home_E, split.at_home_E, split.loads_R, split.replicas_3P
    # Of the two copies: -1 is the home, -2 means none found.
    source, taker, tokens = -2, -2, np.int64(0)
    lowest = target
    for p in range(count):
        e, rank = replicas_3P[0, p], replicas_3P[1, p]
        if home_E[e] == giver and at_home_E[e] > 0 and loads_R[rank] < lowest:
            source, taker, tokens, lowest = -1, p, at_home_E[e], loads_R[rank]
        if rank != giver or replicas_3P[2, p] == 0:
            continue
        if loads_R[home_E[e]] < lowest:
            source, taker, tokens, lowest = p, -1, replicas_3P[2, p], loads_R[home_E[e]]
        for q in range(count):
            if q != p and replicas_3P[0, q] == e and loads_R[replicas_3P[1, q]] < lowest:
                source, taker, tokens, lowest = p, q, replicas_3P[2, p], loads_R[replicas_3P[1, q]]
    if source == -2:
        return False
    wanted = min(loads_R[giver] - target, target - lowest, tokens)
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
        loads_R[replicas_3P[1, taker]] += wanted
    else:
        at_home_E[e] += wanted
        loads_R[home_E[e]] += wanted
    loads_R[giver] -= wanted
    return True


@kernel
def _add(load, limits, split, count):  # type: ignore[no-untyped-def]
    """Add a replica of one of a rank's experts, written at `count`. Returns whether a rank can take one."""
    giver, target, smallest_share = limits
    home_E, at_home_E, loads_R, replicas_3P = load.home_E, split.at_home_E, split.loads_R, split.replicas_3P
    first = giver // load.ranks_per_domain * load.ranks_per_domain
    best, near = -1, -1
    for r in range(first, first + load.ranks_per_domain):
        if split.free_R[r] > 0 and loads_R[r] < target:
            if best < 0 or loads_R[r] < loads_R[best]:
                best = r
            if r // load.ranks_per_node == giver // load.ranks_per_node and (near < 0 or loads_R[r] < loads_R[near]):
                near = r
    if best < 0:
        return False
    excess = loads_R[giver] - target
    taker = near if near >= 0 and target - loads_R[near] >= min(excess, target - loads_R[best]) else best
    has_copy_E = np.zeros(len(home_E), np.bool_)
    for e in range(len(home_E)):
        has_copy_E[e] = home_E[e] == taker
    for p in range(count):
        if replicas_3P[1, p] == taker:
            has_copy_E[replicas_3P[0, p]] = True
    expert, source, tokens = -1, -1, np.int64(0)
    for e in range(len(home_E)):
        if home_E[e] == giver and at_home_E[e] > tokens and not has_copy_E[e]:
            expert, tokens = e, at_home_E[e]
    for p in range(count):
        if replicas_3P[1, p] == giver and replicas_3P[2, p] > tokens and not has_copy_E[replicas_3P[0, p]]:
            expert, source, tokens = replicas_3P[0, p], p, replicas_3P[2, p]
    wanted = min(excess, target - loads_R[taker], tokens)
    if source >= 0 and 0 < tokens - wanted < smallest_share:
        wanted = tokens - smallest_share
    if wanted < max(smallest_share, 1):
        return False
    if source >= 0:
        replicas_3P[2, source] -= wanted
    else:
        at_home_E[expert] -= wanted
    replicas_3P[0, count], replicas_3P[1, count], replicas_3P[2, count] = expert, taker, wanted
    loads_R[giver] -= wanted
    loads_R[taker] += wanted
    split.free_R[taker] -= 1
    return True


@kernel
def _make_room(load, limits, split, count):  # type: ignore[no-untyped-def]
    """On a rank with a free slot, move tokens of its own experts to a copy on a rank below the target, as many as the
    giver's excess. Returns whether a rank can free a smallest share."""
    giver, target, smallest_share = limits
    home_E, at_home_E, loads_R, replicas_3P = load.home_E, split.at_home_E, split.loads_R, split.replicas_3P
    domain = giver // load.ranks_per_domain
    chosen, most = -1, np.int64(0)
    for p in range(count):
        e, rank = replicas_3P[0, p], replicas_3P[1, p]
        if home_E[e] == giver or rank // load.ranks_per_domain != domain or split.free_R[home_E[e]] == 0:
            continue
        room = min(at_home_E[e], target - loads_R[rank], loads_R[giver] - target)
        if room > most and loads_R[home_E[e]] - room < target:
            chosen, most = p, room
    if most < max(smallest_share, 1):
        return False
    e = replicas_3P[0, chosen]
    replicas_3P[2, chosen] += most
    at_home_E[e] -= most
    loads_R[replicas_3P[1, chosen]] += most
    loads_R[home_E[e]] -= most
    return True
