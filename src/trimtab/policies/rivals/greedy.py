"""Replicas by incremental greedy: the busiest rank's largest expert gets a copy, until no rank is above a target.

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
from trimtab.planner.replicas.whole_experts import InstanceLoad
from trimtab.policies.policy import View
from trimtab.policies.rivals.replica_quotas import split_shares


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
    num_experts = len(load.counts_E)
    copies_3C = np.empty((3, num_experts + len(load.loads_R) * load.slots), np.int64)
    copies_3C[:, :num_experts] = np.arange(num_experts), load.home_E, load.counts_E
    split = _Split(copies_3C, load.loads_R.copy(), np.full(len(load.loads_R), load.slots))
    return copies_3C[:, num_experts : _add_replicas(load, target, smallest_share, split)]


class _Split(NamedTuple):
    """The current split of one instance, changed by the kernels.

    Attributes:
        copies_3C: `[3, C]` int64, expert, rank and tokens of every copy. The first E are the homes, in expert order.
        loads_R: `[R]` int64, tokens of every rank.
        free_R: `[R]` int64, slots without a replica.
    """

    copies_3C: Array
    loads_R: Array
    free_R: Array


@kernel
def _add_replicas(load, target, smallest_share, split):  # type: ignore[no-untyped-def]
    """Returns the number of copies.

    The largest expert of the busiest rank gets a copy on the emptiest rank of the domain, in the same node if a rank
    there has as much capacity. If the ranks with free slots are full, one of them first moves tokens to other ranks.
    """
    loads_R = split.loads_R
    stuck_R = np.zeros(len(loads_R), np.bool_)
    count = len(load.counts_E)
    for _ in range(64 * len(loads_R)):
        giver = np.int64(-1)
        for r in range(len(loads_R)):
            if loads_R[r] > target and not stuck_R[r] and (giver < 0 or loads_R[r] > loads_R[giver]):
                giver = np.int64(r)
        if giver < 0:
            break
        limits = (giver, target, smallest_share)
        if _add(load, limits, split, count):
            count += 1
        elif not _make_room(load, limits, split, count):
            stuck_R[giver] = True
    return count


@kernel
def _move(split, source, taker, tokens):  # type: ignore[no-untyped-def]
    """Move tokens from a copy to another of the same expert."""
    _, ranks_C, tokens_C = split.copies_3C
    tokens_C[source] -= tokens
    tokens_C[taker] += tokens
    split.loads_R[ranks_C[source]] -= tokens
    split.loads_R[ranks_C[taker]] += tokens


@kernel
def _part(wanted, tokens, is_replica, smallest_share):  # type: ignore[no-untyped-def]
    """Tokens to move of a copy that has `tokens`: a replica keeps none or a smallest share."""
    wanted = min(wanted, tokens)
    return tokens - smallest_share if is_replica and 0 < tokens - wanted < smallest_share else wanted


@kernel
def _add(load, limits, split, count):  # type: ignore[no-untyped-def]
    """Add a replica of one of a rank's experts, written at `count`. Returns whether a rank can take one."""
    giver, target, smallest_share = limits
    experts_C, ranks_C, tokens_C = split.copies_3C
    loads_R = split.loads_R
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
    has_copy_E = np.zeros(len(load.home_E), np.bool_)
    for c in range(count):
        if ranks_C[c] == taker:
            has_copy_E[experts_C[c]] = True
    source, tokens = np.int64(-1), np.int64(0)
    for c in range(count):
        if ranks_C[c] == giver and tokens_C[c] > tokens and not has_copy_E[experts_C[c]]:
            source, tokens = np.int64(c), tokens_C[c]
    if source < 0:
        return False
    wanted = min(excess, target - loads_R[taker])
    wanted = _part(wanted, tokens, source >= len(load.home_E), smallest_share)
    if wanted < max(smallest_share, 1):
        return False
    experts_C[count], ranks_C[count], tokens_C[count] = experts_C[source], taker, 0
    _move(split, source, count, wanted)
    split.free_R[taker] -= 1
    return True


@kernel
def _make_room(load, limits, split, count):  # type: ignore[no-untyped-def]
    """On a rank with a free slot, move tokens of its own experts to a copy on a rank below the target, as many as the
    giver's excess. Returns whether a rank can free a smallest share."""
    giver, target, smallest_share = limits
    experts_C, ranks_C, tokens_C = split.copies_3C
    loads_R, domain = split.loads_R, giver // load.ranks_per_domain
    chosen, most = np.int64(-1), np.int64(0)
    for p in range(len(load.home_E), count):
        rank, home_rank = ranks_C[p], ranks_C[experts_C[p]]
        if home_rank == giver or rank // load.ranks_per_domain != domain or split.free_R[home_rank] == 0:
            continue
        room = min(tokens_C[experts_C[p]], target - loads_R[rank], loads_R[giver] - target)
        if room > most and loads_R[home_rank] - room < target:
            chosen, most = np.int64(p), room
    if most < max(smallest_share, 1):
        return False
    _move(split, experts_C[chosen], chosen, most)
    return True
