"""`Feedback`: measured against predicted time of steps, and what follows for the next plans.

All ranks learn from the same values, so that they agree in what they have learned.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from trimtab.array_type import Array
from trimtab.planner import PlannedStep
from trimtab.planner.plan.strategy import ALL_BUT_NOTHING, NOTHING

# Steps for which a strategy is not planned after it has measured worse than a simpler one, and for which a measurement
# counts.
DROPPED_STEPS, KEPT_STEPS = 8, 64
# A strategy has to measure worse by this part of the step.
WORSE = 0.01
# Doing nothing is measured once in so many steps, first after the first of these numbers, where the predicted gain is
# below this part. Above, a wrong sign is unlikely, and the busiest rank may not have the memory.
FIRST_COMPARED, COMPARED_EVERY, SMALL_GAIN = 16, 64, 0.1
# Parts of a prediction that are not in the time from the first micro-step to the end of the last backward.
NOT_IN_PASSES = ("planning", "migration", "optimizer")
# Most that one step changes the scale of costs.
MOST_CORRECTION = 8.0


@dataclass
class _Measured:
    """Seconds of a strategy's steps relative to the prediction of doing nothing, the step of the last one, and
    `Strategy.complexity`."""

    relative: float
    step: int
    complexity: tuple[int, bool]


@dataclass
class Feedback:
    """What the steps of a session have taught.

    Attributes:
        scale: factor of the costs of compute and links, to three digits.
        predicted_s, measured_s: of the last complete step; 0 before the first.
    """

    scale: float = 1.0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    _steps: int = 0
    _measured: dict[str, _Measured] = field(default_factory=dict)
    _dropped_until: dict[str, int] = field(default_factory=dict)
    _gain: float = 0.0
    _adapts: bool = True
    _planned: PlannedStep | None = None
    _entered: set[int] = field(default_factory=set)
    _began_at: float = 0.0
    _ended_at: float = 0.0

    def begin(self, planned: PlannedStep | None) -> None:
        """A plan is applied; None if the time of its step tells nothing."""
        self._planned = planned
        self._entered.clear()

    def enter(self, micro_step: int) -> None:
        """A micro-step begins."""
        if not self._entered:
            self._began_at = time.perf_counter()
        self._entered.add(micro_step)

    def mark(self) -> None:
        """A micro-step or a backward has ended."""
        self._ended_at = time.perf_counter()

    def take(self) -> int:
        """Microseconds of the last step's passes on this rank; 0 if it did not run all micro-steps of its plan."""
        if self._planned is None or len(self._entered) < self._planned.plan.num_micro_steps:
            return 0
        return max(1, round((self._ended_at - self._began_at) * 1e6))

    def learn(self, measured_R: Array, *, adapts: bool = True) -> None:
        """Learn from a step. Call it with the same values on all ranks.

        Args:
            measured_R: `take` of every rank.
            adapts: whether later plans may depend on measured times.
        """
        planned, self._planned = self._planned, None
        if planned is None or not measured_R.all() or not planned.parts_s:
            return
        passes_s = float(measured_R.max()) * 1e-6
        outside_s = sum(planned.parts_s[part] for part in NOT_IN_PASSES)
        nothing_s = planned.nothing_s - planned.parts_s["optimizer"]
        self.predicted_s, self.measured_s = planned.predicted_s - outside_s, passes_s
        if min(self.predicted_s, nothing_s) <= 0:
            return
        self._steps += 1
        self._gain, self._adapts = planned.predicted_gain, adapts
        if self._steps == 1 or not adapts:
            # The first step compiles and allocates.
            return
        name, relative = planned.strategy, passes_s / nothing_s
        before = self._measured.get(name)
        smooth = relative if before is None else math.sqrt(before.relative * relative)
        self._measured[name] = _Measured(smooth, self._steps, planned.chosen_strategy.complexity)
        ratio = min(max(passes_s / self.predicted_s, 1 / MOST_CORRECTION), MOST_CORRECTION)
        correction = math.sqrt(ratio)
        self.scale = float(f"{self.scale * correction:.3g}")
        # Later predictions of doing nothing are larger by the same factor.
        for measured in self._measured.values():
            measured.relative /= correction
        if name != NOTHING.name and self._is_worse(name):
            self._dropped_until[name] = self._steps + DROPPED_STEPS
            del self._measured[name]

    @property
    def measures_nothing(self) -> bool:
        """Whether the next step does nothing, to measure that."""
        return self._adapts and self._steps % COMPARED_EVERY == FIRST_COMPARED and self._gain < SMALL_GAIN

    @property
    def excluded(self) -> frozenset[str]:
        """Names of strategies that the next plan does not use."""
        if self.measures_nothing:
            return ALL_BUT_NOTHING
        return frozenset(name for name, until in self._dropped_until.items() if self._steps < until)

    def metrics(self) -> dict[str, float]:
        """Figures of the last complete step."""
        if not self._steps:
            return {}
        figures = {"plan/predicted_s": self.predicted_s, "plan/measured_s": self.measured_s}
        if self._adapts:
            figures["plan/cost_scale"] = self.scale
        nothing = self._measured.get(NOTHING.name)
        if nothing is not None:
            best = min(measured.relative for measured in self._measured.values())
            figures["plan/measured_gain"] = 1 - best / nothing.relative
        return figures

    def _is_worse(self, name: str) -> bool:
        """Whether a simpler strategy has measured better."""
        mine = self._measured[name]
        return any(
            other.complexity < mine.complexity
            and self._steps - other.step < KEPT_STEPS
            and other.relative < (1 - WORSE) * mine.relative
            for other in self._measured.values()
        )
