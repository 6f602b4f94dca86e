"""Plain reference of UltraEP's public quota kernel: thresholds probed and quotas given, in its order.

The kernel solves one domain in one node; here nodes are preferred too, if a domain has several.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.planner.replicas.whole_experts import InstanceLoad
from trimtab.policies.rivals.ultraep import Search

WARPS = 4
Quotas = list[tuple[int, int, int]]
"""Expert, rank and tokens of every replica, in the order in which they were given."""


@dataclass(frozen=True)
class Solved:
    """A solved domain.

    Attributes:
        threshold: load up to which ranks were reduced.
        searched: true: none of the first thresholds could be reached.
    """

    threshold: int
    quotas: Quotas
    searched: bool


def solve_domains(load: InstanceLoad, search: Search) -> list[Solved]:
    """Solve every domain by itself."""
    firsts = range(0, len(load.loads_R), load.ranks_per_domain)
    return [solve_domain(load, search, range(first, first + load.ranks_per_domain)) for first in firsts]


def solve_domain(load: InstanceLoad, search: Search, ranks: range) -> Solved:
    """Solve the domain of some ranks."""
    counts, loads = load.counts_E.tolist(), {r: int(load.loads_R[r]) for r in ranks}
    order = sorted(ranks, key=lambda r: (-loads[r], r))

    def give(target: int, near_first: bool, *, dynamic: bool) -> Quotas | None:
        slack = {r: max(target - loads[r], 0) for r in ranks}
        free = dict.fromkeys(ranks, load.slots)
        given: Quotas = []
        for source in order:
            need = max(loads[source] - target, 0)
            for expert in sorted(np.flatnonzero(load.home_E == source).tolist(), key=lambda e: (-counts[e], e)):
                left = max(counts[expert] - 1, 0)
                while need > 0 and left > 0:
                    open_ranks = [r for r in ranks if slack[r] > 0 and free[r] > 0]
                    floor = -(-need // max(len(open_ranks), 1)) if dynamic else search.smallest_quota
                    fitting = [r for r in open_ranks if min(need, slack[r], left) >= floor]
                    near = [r for r in fitting if r // load.ranks_per_node == source // load.ranks_per_node]
                    if not fitting:
                        break
                    to = max(near if near_first and near else fitting, key=lambda r: (slack[r], -r))
                    tokens = min(need, slack[to], left)
                    given.append((expert, to, tokens))
                    slack[to] -= tokens
                    free[to] -= 1
                    need -= tokens
                    left -= tokens
            if need > 0:
                return None
        return given

    def plan(target: int, *, dynamic: bool) -> Quotas | None:
        given = give(target, True, dynamic=dynamic)
        return give(target, False, dynamic=dynamic) if given is None else given

    mean = np.float32(sum(loads.values())) / np.float32(len(ranks))
    low = int(np.ceil(mean * np.float32(max(search.threshold, 1.0))))
    high = max(*loads.values(), low)
    if load.slots == 0 or len(ranks) == 1:
        return Solved(high, [], searched=False)
    target = max(low, int(np.ceil(np.float32(low) * (np.float32(1.0) + np.float32(search.tolerance)))))
    for _ in range(search.first_tries):
        given = plan(min(target, high), dynamic=True)
        if given is not None:
            return Solved(min(target, high), given, searched=False)
        target = min(high, target + max(1, (high + 99) // 100))
    given = plan(low, dynamic=False)
    if given is not None:
        return Solved(low, given, searched=True)
    low = min(low + 1, high)
    while low < high:
        gap = high - low
        if gap <= WARPS:
            probes = [low + w for w in range(WARPS) if low + w < high]
        else:
            probes = [low + gap * (w + 1) // (WARPS + 1) for w in range(WARPS)]
        reached = [plan(probe, dynamic=False) is not None for probe in probes]
        first = reached.index(True) if True in reached else len(probes)
        high = [*probes, high][first]
        low = probes[first - 1] + 1 if first > 0 else low
    final = plan(low, dynamic=False)
    assert final is not None, "the kernel ends with a threshold that it has reached"
    return Solved(low, final, searched=True)
