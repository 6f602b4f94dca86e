"""Plain reference of UltraEP's public quota kernel for one domain: thresholds probed and quotas given, in its order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FAST_RETRIES = 2
WARPS = 4


@dataclass(frozen=True)
class Solved:
    """A solved domain.

    Attributes:
        threshold: load up to which ranks were reduced.
        quotas: (expert, rank, tokens) of every replica, in the order in which they were given.
        searched: true: none of the first thresholds could be reached.
    """

    threshold: int
    quotas: list[tuple[int, int, int]]
    searched: bool


def solve_domain(
    counts: list[int], ranks: int, slots: int, *, smallest: int = 1024, eps: float = 0.01, threshold: float = 1.0
) -> Solved:
    """Solve one domain whose rank r has the r-th part of the experts."""
    per_rank = len(counts) // ranks
    loads = [sum(counts[r * per_rank : (r + 1) * per_rank]) for r in range(ranks)]
    order = sorted(range(ranks), key=lambda r: (-loads[r], r))
    experts = [sorted(range(r * per_rank, (r + 1) * per_rank), key=lambda e: (-counts[e], e)) for r in range(ranks)]

    def plan(target: int, *, dynamic: bool) -> list[tuple[int, int, int]] | None:
        slack = [max(target - load, 0) for load in loads]
        used = [0] * ranks
        given: list[tuple[int, int, int]] = []
        if sum(max(load - target, 0) for load in loads) > sum(slack):
            return None
        for source in order:
            need = max(loads[source] - target, 0)
            for expert in experts[source]:
                holds = {source}
                left = max(counts[expert] - 1, 0)
                while need > 0 and left > 0:
                    open_ranks = [r for r in range(ranks) if slack[r] > 0 and used[r] < slots and r not in holds]
                    if not open_ranks:
                        break
                    floor = -(-need // len(open_ranks)) if dynamic else smallest
                    fitting = [r for r in open_ranks if min(need, slack[r], left) >= floor]
                    if not fitting:
                        break
                    to = max(fitting, key=lambda r: (slack[r], -r))
                    tokens = min(need, slack[to], left)
                    given.append((expert, to, tokens))
                    slack[to] -= tokens
                    used[to] += 1
                    holds.add(to)
                    need -= tokens
                    left -= tokens
            if need > 0:
                return None
        return given

    mean = np.float32(sum(loads)) / np.float32(ranks)
    low = int(np.ceil(mean * np.float32(max(threshold, 1.0))))
    high = max(max(loads), low)
    if slots == 0 or ranks == 1:
        return Solved(high, [], searched=False)
    target = max(low, int(np.ceil(np.float32(low) * (np.float32(1.0) + np.float32(eps)))))
    for _ in range(FAST_RETRIES + 1):
        given = plan(target, dynamic=True)
        if given is not None:
            return Solved(target, given, searched=False)
        target = min(high, target + max(1, (high + 99) // 100))
    while sum(max(load - low, 0) for load in loads) > sum(max(low - load, 0) for load in loads):
        low += 1
    given = plan(low, dynamic=False)
    if given is not None:
        return Solved(low, given, searched=True)
    low = min(low + 1, high)
    while low < high:
        gap = high - low
        if gap <= WARPS:
            probes = [low + w for w in range(WARPS) if low + w < high]
            high = low = next((probe for probe in probes if plan(probe, dynamic=False) is not None), high)
        else:
            probes = [low + gap * (w + 1) // (WARPS + 1) for w in range(WARPS)]
            reached = [plan(probe, dynamic=False) is not None for probe in probes]
            if True in reached:
                first = reached.index(True)
                high = probes[first]
                low = probes[first - 1] + 1 if first > 0 else low
            else:
                low = probes[-1] + 1
    final = plan(low, dynamic=False)
    assert final is not None, "the kernel ends with a threshold that it has reached"
    return Solved(low, final, searched=True)
