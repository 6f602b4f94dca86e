"""From which skew of the routing on a strategy pays."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from trimtab.planner import SequenceCounts
from trimtab.policies import POLICIES
from trimtab.simulator.comparison import simulate_policy
from trimtab.simulator.comparison_case import ComparisonCase
from trimtab.simulator.draws import Estimate
from trimtab.simulator.strategies import NOTHING, RunStrategy

# Skew of the routing relative to the trace's.
SKEWS = (0.0, 0.25, 0.5, 1.0, 1.5)


def break_even(case: ComparisonCase, strategy: RunStrategy, least_gain: float) -> tuple[Estimate, float] | None:
    """max/mean of rank loads from which the strategy saves that part of a step, and that of the trace.

    The skew of all sequences is scaled; transfers are estimated. None if no scaled skew is near enough.
    """
    points = []
    for skew in SKEWS:
        scaled = _with_skew(case, skew)
        static = simulate_policy(scaled, NOTHING.name, POLICIES["static"])
        other = strategy.simulate(scaled)
        gain = 1 - other.simulated.step_time_s / static.simulated.step_time_s
        points.append((static.balance.mean, gain))
    now = points[SKEWS.index(1.0)][0]
    if points[0][1] >= least_gain:
        return Estimate(1.0, 1.0, points[0][0]), now
    for (low, before), (high, after) in pairwise(points):
        if before < least_gain <= after:
            at = low + (least_gain - before) / (after - before) * (high - low)
            return Estimate(at, low, high), now
    return None


def _with_skew(case: ComparisonCase, skew: float) -> ComparisonCase:
    """The case with the counts of each sequence moved towards even routing, or away from it."""

    def scaled(counts: SequenceCounts) -> SequenceCounts:
        mean_SL1 = counts.counts_SLE.mean(axis=2, keepdims=True, dtype=np.float64)
        moved_SLE = np.maximum(0.0, mean_SL1 + skew * (counts.counts_SLE - mean_SL1))
        moved_SLE *= mean_SL1 / np.maximum(moved_SLE.mean(axis=2, keepdims=True), 1e-30)
        # Sums stay those of the sequence.
        sums_SLE = np.rint(np.cumsum(moved_SLE, axis=2))
        whole_SLE = np.diff(sums_SLE, axis=2, prepend=0.0).astype(counts.counts_SLE.dtype)
        return replace(counts, counts_SLE=whole_SLE)

    return replace(
        case, sequences=scaled(case.sequences), earlier=tuple(map(scaled, case.earlier)), traces=(), halves=()
    )
