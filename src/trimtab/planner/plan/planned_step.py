"""`PlannedStep`: the plans of one step, and what is predicted of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.array_type import Array
from trimtab.planner.placement.placement import Placement
from trimtab.planner.plan.slices import SliceRules
from trimtab.planner.plan.step_plan import StepPlan
from trimtab.planner.plan.strategy import NOTHING, Strategy
from trimtab.planner.schedule.schedule import Schedule


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A planned step, before its sequences are sent to their ranks.

    Attributes:
        schedule: on the data ranks of all expert-parallel groups.
        plans: one for each group; on a rank of a session, that of its group alone.
        chosen_strategy: what the plans do, the strategy with the least predicted time.
        strategies_s: predicted seconds of the step by name of the strategy, the least first. Moves count in equal parts
            in the steps of their expected life.
        parts_s: predicted seconds of the step by part, with the names of `PARTS`.
        max_vio_before: max/mean - 1 of rank loads, mean over instances, at the present homes without replicas.
        move_life: steps for which homes are expected to stay.
        slots_s: predicted seconds by number of slots of a rank, if it was chosen for this step; else empty.
        slices: the rules by which replicas and split follow, if the plans are headers; None if they have them.
        planning_s: in a session, seconds from counting to the end of the plan's broadcast.
        ahead_s: in a session, seconds of counting and planning on the first rank, before, during the rollout.
        known_ahead: the part of the step's tokens from which homes and strategy were chosen then; 0 if they were not.
        sequences: `[S]` uint64, hashes that identify the sequences of the schedule, if `Session.plan_sequences` planned
            them.
    """

    schedule: Schedule
    plans: tuple[StepPlan, ...]
    chosen_strategy: Strategy = NOTHING
    strategies_s: Mapping[str, float] = field(default_factory=dict)
    parts_s: Mapping[str, float] = field(default_factory=dict)
    max_vio_before: float = 0.0
    move_life: float = 1.0
    slots_s: Mapping[int, float] = field(default_factory=dict)
    slices: SliceRules | None = None
    planning_s: float = 0.0
    ahead_s: float = 0.0
    known_ahead: float = 0.0
    sequences: Array | None = None

    @property
    def plan(self) -> StepPlan:
        """The plan of this rank's expert-parallel group."""
        return self.plans[0]

    @property
    def placement(self) -> Placement:
        """The homes, the same in all groups."""
        return self.plan.placement

    @property
    def strategy(self) -> str:
        """The name of the chosen strategy."""
        return self.chosen_strategy.name

    @property
    def runner_up(self) -> str:
        """The name of the best other strategy; "" if there is none."""
        return next((name for name in self.strategies_s if name != self.strategy), "")

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of the step; 0 if nothing was predicted."""
        return sum(self.parts_s.values())

    @property
    def nothing_s(self) -> float:
        """Predicted seconds of the step if nothing is done; 0 if nothing was predicted."""
        return self.strategies_s.get(NOTHING.name, 0.0)

    @property
    def predicted_gain(self) -> float:
        """Predicted saving of the best strategy over doing nothing, as a fraction of the step. It is given also where
        it is too small for a plan to be executed."""
        return 1 - min(self.strategies_s.values()) / max(self.nothing_s, 1e-30) if self.strategies_s else 0.0
