"""Figures of a strategy over several drawings of the same steps, with intervals, and the skew from which it pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, pvariance

import numpy as np

from trimtab.planner import SequenceCounts
from trimtab.policies import POLICIES
from trimtab.simulator.comparison import Outcome, simulate_policy
from trimtab.simulator.comparison_case import ComparisonCase
from trimtab.simulator.step import SimulatedStep, mean_step
from trimtab.simulator.strategies import NOTHING, RunStrategy

# Half of an interval, in standard deviations.
DEVIATIONS = 2.0
# Skew of the routing relative to the trace's.
SKEWS = (0.0, 0.25, 0.5, 1.0, 1.5)


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval, [low, high]; both are the figure if nothing is known of its spread."""

    value: float
    low: float
    high: float

    @classmethod
    def scaled(cls, draws: Sequence[tuple[float, float, float]]) -> Estimate:
        """Of resampled steps.

        The interval has two standard deviations of the recorded sequences and of the drawing, and the correction. Half
        of the prompts against the other half tell how much the recorded ones vary.

        Args:
            draws: of each drawing, the figure as resampled, and from each half of the prompts.
        """
        corrected = [2 * whole - (first + second) / 2 for whole, first, second in draws]
        value = fmean(corrected)
        variance = fmean([(first - second) ** 2 / 4 for _, first, second in draws])
        variance += pvariance(corrected) / len(corrected)
        half = DEVIATIONS * variance**0.5 + abs(value - fmean([whole for whole, _, _ in draws]))
        return cls(value, value - half, value + half)

    @classmethod
    def measured(cls, steps: Sequence[float]) -> Estimate:
        """Of whole steps: their mean, and their range."""
        return cls(fmean(steps), min(steps), max(steps))


@dataclass(frozen=True, eq=False)
class Drawn:
    """One strategy in all drawings.

    Attributes:
        outcomes: of each drawing, the first one's figures are shown where no interval is.
    """

    outcomes: tuple[Outcome, ...]

    @property
    def simulated(self) -> SimulatedStep:
        """Mean seconds of the drawings."""
        return mean_step([outcome.simulated for outcome in self.outcomes])

    @property
    def step_s(self) -> Estimate:
        """Seconds of a step."""
        if self.outcomes[0].drawn_s:
            return Estimate.scaled([outcome.drawn_s for outcome in self.outcomes])  # type: ignore[misc]
        return Estimate.measured(self.outcomes[0].step_times_s)

    def speedup(self, base: Drawn) -> Estimate:
        """Step time of another strategy divided by this one's, drawing by drawing."""
        pairs = list(zip(base.outcomes, self.outcomes, strict=False))
        if self.outcomes[0].drawn_s:
            ratios = [tuple(a / b for a, b in zip(x.drawn_s, y.drawn_s, strict=True)) for x, y in pairs]
            found = Estimate.scaled(ratios)  # type: ignore[arg-type]
        else:
            first, second = pairs[0]
            found = Estimate.measured([a / b for a, b in zip(first.step_times_s, second.step_times_s, strict=True)])
        # The figure itself is the ratio of the seconds that are shown.
        value = base.step_s.value / self.step_s.value
        return Estimate(value, min(value, found.low), max(value, found.high))


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
