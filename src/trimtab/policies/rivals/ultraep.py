"""`ultraep`: quotas of replicas from the exact load of a layer, once its router has chosen.

Source: UltraEP (arXiv 2606.04101, code at Dots-Infra/UltraEP); our reimplementation. In every layer and micro-batch,
after gating, a CUDA kernel searches for the lowest load threshold that replicas can reach. For a threshold, ranks above
it give, heaviest rank and heaviest expert first, quotas to the rank with the most room that has a free slot; an
expert's home keeps at least one token. A few thresholds just above the mean are tried first, with a smallest quota
that only requires an even use of the ranks with room. If none is reached, a search with `smallest_quota` follows that
tests four thresholds per round. Inside one domain, thresholds and quotas equal those of the public kernel. Slots are
shared by all layers and replicas stay inside the NVLink domain; domains are independent. Max/mean 1.01-1.04 from
1.30-4.01. Planning and weight transfer are on the critical path of the layer.

Planning time is published for 64 ranks and 256 experts: 67, 72 and 78 us with 38, 46 and 51 replicas (README of the
code). That is 35 us plus 0.85 us per replica. Replicas grow with the ranks of a domain, so other sizes are charged
35 us plus 0.67 us per rank of the domain.

Not specified by the source, and our choices:

* the domain: a node;
* sources of a replica's tokens: its own rank first, as published. UltraEP spreads the rest in proportion; ours takes
  the rest from the own node first, which reduces traffic between nodes.

On equal terms a replica may be on any rank; its home's node is preferred.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner import StepPlan
from trimtab.planner.replicas.whole_experts import InstanceLoad
from trimtab.policies.planning_time import ULTRAEP_SIZES, PlanningTime
from trimtab.policies.policy import Choices, Traits, View
from trimtab.policies.rivals.replica_quotas import split_shares


@dataclass(frozen=True)
class UltraEp:
    """Search for the lowest threshold that every domain can reach.

    Attributes:
        threshold: lowest target of max/mean load.
        smallest_quota: fewest tokens of a replica in the search.
        tolerance: how far above `threshold` the first try may end.
        first_tries: thresholds tried before the search, an extra percent of the busiest rank each. With none,
            `smallest_quota` holds for every replica.
    """

    traits: ClassVar[Traits] = Traits(
        known_at="layer",
        planning=PlanningTime.published(*ULTRAEP_SIZES, source="UltraEP's README"),
        waits_for_weights=True,
        within_node=True,
    )
    choices: ClassVar[Choices] = (
        {"smallest_quota": 1024, "tolerance": 0.01},
        {"smallest_quota": 1024, "tolerance": 0.003},
        {"smallest_quota": 128, "tolerance": 0.01},
        {"smallest_quota": 128, "tolerance": 0.03},
    )
    threshold: float = 1.0
    smallest_quota: int = 1024
    tolerance: float = 0.01
    first_tries: int = 3

    def plan(self, view: View) -> StepPlan:
        cluster = view.cluster
        search = Search(float(self.threshold), self.smallest_quota, float(self.tolerance), self.first_tries)
        replicas_3P = np.empty((3, cluster.ranks * cluster.slots_per_rank), np.int64)

        def plan_one(_: int, counts_RE: Array, home_E: Array) -> tuple[Array, Array]:
            load = InstanceLoad.of(counts_RE.sum(axis=0), home_E, cluster, within_node=not view.equal_terms)
            count = solve_quotas(load, heaviest_first(load), search, replicas_3P)
            return split_shares(counts_RE, load, replicas_3P[:, :count])

        return view.plan_instances(plan_one, placement=view.placement, slots=cluster.slots_per_rank)


class Search(NamedTuple):
    """The settings of `UltraEp`, for kernels."""

    threshold: float
    smallest_quota: int
    tolerance: float
    first_tries: int


PROBES = 4
"""Thresholds that a round of the search tests, as the source's kernel does with one warp each."""


class Order(NamedTuple):
    """Ranks and experts in the order in which they give tokens.

    Attributes:
        ranks_R: `[R]` int64, by domain, the most loaded first.
        experts_E: `[E]` int64, by home rank, the heaviest first.
        starts: `[R + 1]` int64; experts of rank r are from `starts[r]` to `starts[r + 1]`.
    """

    ranks_R: Array
    experts_E: Array
    starts: Array


def heaviest_first(load: InstanceLoad) -> Order:
    """Returns the order of an instance; of equal loads the lower index is first."""
    ranks = np.arange(len(load.loads_R))
    experts_E = np.lexsort((-load.counts_E, load.home_E))
    starts = np.searchsorted(load.home_E[experts_E], np.arange(len(ranks) + 1))
    return Order(np.lexsort((-load.loads_R, ranks // load.ranks_per_domain)), experts_E, starts)


@kernel
def solve_quotas(load, order, search, replicas_3P):  # type: ignore[no-untyped-def]
    """Replicas of one instance; every domain is solved independently.

    Args:
        load: `InstanceLoad`.
        order: `Order`.
        search: `Search`.
        replicas_3P: `[3, R * slots]` int64, filled with expert, rank and tokens of every replica.

    Returns:
        The number of replicas.
    """
    count = np.int64(0)
    for first in range(0, len(load.loads_R), load.ranks_per_domain):
        domain_R = load.loads_R[first : first + load.ranks_per_domain]
        busiest = domain_R.max()
        # In float32, as in the source, so that thresholds are equal to the token.
        mean = np.float32(domain_R.sum()) / np.float32(load.ranks_per_domain)
        lowest = np.int64(math.ceil(mean * np.float32(max(search.threshold, 1.0))))
        if busiest <= lowest or load.slots == 0:
            continue
        reached = np.int64(-1)
        target = np.int64(math.ceil(np.float32(lowest) * (np.float32(1.0) + np.float32(search.tolerance))))
        for _ in range(search.first_tries):
            if reached < 0:
                target = min(busiest, target)
                reached = reach(load, order, (first, target, np.int64(0)), count, replicas_3P)
                target += max(1, (busiest + 99) // 100)
        if reached < 0:
            target = _lowest_threshold(load, order, (first, lowest, busiest), search, count, replicas_3P)
            reached = reach(load, order, (first, target, np.int64(search.smallest_quota)), count, replicas_3P)
        count = reached
    return count


@kernel
def _lowest_threshold(load, order, limits, search, count, replicas_3P):  # type: ignore[no-untyped-def]
    """The threshold that the search of a domain ends with, `PROBES` at a time.

    A threshold above one that can be reached need not be reachable, so the result depends on the probes.

    Args:
        limits: first rank of the domain, lowest threshold, and load of its busiest rank.
    """
    first, low, high = limits
    total = load.loads_R[first : first + load.ranks_per_domain].sum()
    low = max(low, (total + load.ranks_per_domain - 1) // load.ranks_per_domain)
    smallest_quota = np.int64(search.smallest_quota)
    if reach(load, order, (first, low, smallest_quota), count, replicas_3P) >= 0:
        return low
    low += 1
    while low < high:
        gap = high - low
        for probe in range(PROBES):
            if gap <= PROBES:
                target = low  # Neighbours, one after another, up to the last that is below `high`.
            else:
                target = high - gap + gap * (probe + 1) // (PROBES + 1)
            if target >= high:
                break
            if reach(load, order, (first, target, smallest_quota), count, replicas_3P) >= 0:
                high = target
                break
            low = target + 1
    return high


@kernel
def reach(load, order, attempt, count, replicas_3P):  # type: ignore[no-untyped-def]
    """Reduce a domain's ranks to a target load; the number of replicas, or -1 if they can't be.

    Ranks in the giver's node are preferred; if that fails, the rank with the most room.

    Args:
        attempt: first rank of the domain, target, and fewest tokens of a replica; 0 for an even part of what the giver
            has above the target.
        count: replicas so far; new ones are written from there on.
    """
    reached = np.int64(-1)
    for any_node in range(2 if load.ranks_per_domain > load.ranks_per_node else 1):
        if reached < 0:
            reached = _give(load, order, attempt, any_node > 0, count, replicas_3P)
    return reached


@kernel
def _give(load, order, attempt, any_node, count, replicas_3P):  # type: ignore[no-untyped-def]
    """One attempt of `reach`."""
    first, target, smallest_quota = attempt
    last = first + load.ranks_per_domain
    room_R = np.zeros(len(load.loads_R), np.int64)
    free_R = np.zeros(len(load.loads_R), np.int64)
    for r in range(first, last):
        room_R[r] = max(target - load.loads_R[r], 0)
        free_R[r] = load.slots
    for giver in order.ranks_R[first:last]:
        need = load.loads_R[giver] - target
        if need <= 0:
            return count
        node = giver // load.ranks_per_node
        for expert in order.experts_E[order.starts[giver] : order.starts[giver + 1]]:
            available = load.counts_E[expert] - 1
            while need > 0 and available > 0:
                best, near, takers = -1, -1, 0
                for r in range(first, last):
                    if room_R[r] > 0 and free_R[r] > 0:
                        takers += 1
                        if best < 0 or room_R[r] > room_R[best]:
                            best = r
                        if r // load.ranks_per_node == node and (near < 0 or room_R[r] > room_R[near]):
                            near = r
                if best < 0:
                    return np.int64(-1)
                least = smallest_quota if smallest_quota > 0 else (need + takers - 1) // takers
                use_near = not any_node and near >= 0 and min(need, available, room_R[near]) >= least
                taker = near if use_near else best
                tokens = min(need, available, room_R[taker])
                if tokens < least:
                    break
                replicas_3P[0, count], replicas_3P[1, count], replicas_3P[2, count] = expert, taker, tokens
                count += 1
                room_R[taker] -= tokens
                free_R[taker] -= 1
                need -= tokens
                available -= tokens
        if need > 0:
            return np.int64(-1)
    return count
