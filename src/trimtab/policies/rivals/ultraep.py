"""UltraEP: quotas from the exact load of a layer, once its router has chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner import StepPlan
from trimtab.policies.policy import Traits, View
from trimtab.policies.rivals.shares import split_shares


@dataclass(frozen=True)
class UltraEp:
    """The quota solver of UltraEP (arXiv 2606.04101, code at Dots-Infra/UltraEP), reimplemented.

    Published: in every layer and micro-batch, after gating, a CUDA kernel searches for the lowest load threshold that
    replicas can reach. For a threshold, ranks above it give, heaviest rank and heaviest expert first, quotas to the
    rank with the most room that has a free slot; an expert's home keeps at least one token. A few thresholds just above
    the mean are tried first, with a smallest quota that only asks for an even use of the ranks that have room; if
    none is reached, a search with `smallest_quota` follows. Slots are shared by all layers and replicas stay
    inside the NVLink domain, each domain on its own. 67-78 us at 64 ranks and 256 experts, max/mean 1.01-1.04 from
    1.30-4.01. Planning and weight transfer are on the critical path of the layer.

    Unpublished details and our choices: a domain is a node. Sources send to their own rank first, as published; the
    rest, which UltraEP spreads in proportion, we send to the own node first, which reduces traffic between nodes. Their
    search tests four thresholds at a time, ours one.

    On equal terms a replica may be on any rank; its home's node is preferred.

    Attributes:
        threshold: lowest target of max/mean load.
        smallest_quota: fewest tokens of a replica in the search.
        tolerance: how far above `threshold` the first try may end.
        first_tries: thresholds tried before the search, an extra percent of the busiest rank each. With none,
            `smallest_quota` holds for every replica.
    """

    traits: ClassVar[Traits] = Traits(
        known_at="layer", plans_on="gpu", published_us=78.0, waits_for_weights=True, within_node=True
    )
    threshold: float = 1.0
    smallest_quota: int = 1024
    tolerance: float = 0.01
    first_tries: int = 3

    def plan(self, view: View) -> StepPlan:
        cluster = view.cluster
        domain = cluster.ranks if view.equal_terms else cluster.ranks_per_node
        replicas_3P = np.empty((3, cluster.ranks * cluster.slots_per_rank), np.int64)

        def plan_one(_: int, counts_RE: Array, home_E: Array) -> tuple[Array, Array]:
            count = solve_quotas(
                counts_RE.sum(axis=0),
                home_E,
                cluster.ranks,
                cluster.ranks_per_node,
                domain,
                cluster.slots_per_rank,
                self.threshold,
                self.smallest_quota,
                self.tolerance,
                self.first_tries,
                replicas_3P,
            )
            return split_shares(counts_RE, home_E, cluster.ranks_per_node, replicas_3P[:, :count])

        return view.plan_instances(plan_one, placement=view.placement, slots=cluster.slots_per_rank)


@kernel
def solve_quotas(  # type: ignore[no-untyped-def]
    counts_E,
    home_E,
    num_ranks,
    ranks_per_node,
    ranks_per_domain,
    slots,
    threshold,
    smallest_quota,
    tolerance,
    first_tries,
    replicas_3P,
):
    """Replicas of one instance, every domain of neighbouring ranks on its own.

    Args:
        counts_E: `[E]` int64 tokens of every expert.
        home_E: `[E]` int64 home ranks.
        replicas_3P: `[3, R * slots]` int64, filled with expert, rank and tokens of every replica.

    Returns:
        The number of replicas.
    """
    loads, experts, starts = _heaviest_first(counts_E, home_E, num_ranks)
    count = 0
    for first in range(0, num_ranks, ranks_per_domain):
        last = first + ranks_per_domain
        lowest = math.ceil(loads[first:last].sum() * threshold / ranks_per_domain)
        busiest = loads[first:last].max()
        if busiest <= lowest or slots == 0:
            continue
        givers = first + np.argsort(-loads[first:last], kind="mergesort")
        domain = (loads, counts_E, experts, starts, givers, first, last, ranks_per_node, slots)
        found = -1
        target = math.ceil(lowest * (1 + tolerance))
        for _ in range(first_tries):
            found = _reach(min(target, busiest), 0, domain, count, replicas_3P)
            if found >= 0:
                break
            target += max(1, math.ceil(busiest / 100))
        low, high = lowest, busiest
        while found < 0:
            target = lowest if low == lowest else (low + high) // 2
            reached = _reach(target, smallest_quota, domain, count, replicas_3P)
            if reached < 0:
                low = target + 1
            elif target == low:
                found = reached
            else:
                high = target
        count = found
    return count


@kernel
def _heaviest_first(counts_E, home_E, num_ranks):  # type: ignore[no-untyped-def]
    """Loads `[R]`, and the experts of each rank, heaviest first: those of r from `starts[r]` to `starts[r + 1]`."""
    loads = np.zeros(num_ranks, np.int64)
    starts = np.zeros(num_ranks + 1, np.int64)
    for e in range(len(counts_E)):
        loads[home_E[e]] += counts_E[e]
        starts[home_E[e] + 1] += 1
    starts = np.cumsum(starts)
    filled = starts[:-1].copy()
    experts = np.empty(len(counts_E), np.int64)
    for e in np.argsort(-counts_E, kind="mergesort"):
        experts[filled[home_E[e]]] = e
        filled[home_E[e]] += 1
    return loads, experts, starts


@kernel
def _reach(target, smallest_quota, domain, count, replicas_3P):  # type: ignore[no-untyped-def]
    """Reduce the domain's ranks to `target`, writing replicas from `count` on. Returns their new number, or -1.

    Takers in the giver's node are preferred, then the one with the most capacity. Without a `smallest_quota` (0), a
    taker gets at least an even part of the giver's excess.
    """
    first, last, ranks_per_node = domain[5], domain[6], domain[7]
    reached = _give(target, smallest_quota, domain, True, count, replicas_3P)
    if reached < 0 and last - first > ranks_per_node:
        reached = _give(target, smallest_quota, domain, False, count, replicas_3P)
    return reached


@kernel
def _give(target, smallest_quota, domain, node_first, count, replicas_3P):  # type: ignore[no-untyped-def]
    loads, counts_E, experts, starts, givers, first, last, ranks_per_node, slots = domain
    room = np.maximum(target - loads, 0)
    free = np.full(len(loads), slots, np.int64)
    for giver in givers:
        need = loads[giver] - target
        if need <= 0:
            return count
        node = giver // ranks_per_node * ranks_per_node
        for i in range(starts[giver], starts[giver + 1]):
            expert = experts[i]
            available = counts_E[expert] - 1
            while need > 0 and available > 0:
                best, near, takers = -1, -1, 0
                for r in range(first, last):
                    if room[r] > 0 and free[r] > 0:
                        takers += 1
                        if best < 0 or room[r] > room[best]:
                            best = r
                        if node <= r < node + ranks_per_node and (near < 0 or room[r] > room[near]):
                            near = r
                if best < 0:
                    return -1
                least = smallest_quota if smallest_quota > 0 else (need + takers - 1) // takers
                taker = near if node_first and near >= 0 and min(need, available, room[near]) >= least else best
                tokens = min(need, available, room[taker])
                if tokens < least:
                    break
                replicas_3P[0, count], replicas_3P[1, count], replicas_3P[2, count] = expert, taker, tokens
                count += 1
                room[taker] -= tokens
                free[taker] -= 1
                need -= tokens
                available -= tokens
            if need == 0:
                break
        if need > 0:
            return -1
    return count
