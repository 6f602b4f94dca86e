"""Figures of a strategy over several drawings of the same steps, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance

from trimtab.simulator.comparison import Outcome
from trimtab.simulator.step import SimulatedStep, mean_step

# Half of an interval, in standard deviations.
DEVIATIONS = 2.0


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
