"""`PlannedStep`: what planning a step gives each rank; `PlanReport`: figures of a plan that was applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.array_type import Array
from trimtab.planner import Schedule, StepPlan, Workload
from trimtab.planner.plan.slices import SliceRules


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A planned step, before its sequences are sent to their ranks.

    Attributes:
        schedule: the schedule of all data ranks.
        plan: the plan of this rank's expert-parallel group.
        strategy: what the plan does, the strategy with the least predicted time.
        runner_up: the second best strategy; "" if there is no other.
        predicted_s: predicted seconds of the step.
        predicted_gain: predicted saving of the best strategy over doing nothing, as a fraction of the step. It is given
            also where it is too small for a plan to be executed.
        max_vio_before: max/mean - 1 of rank loads, mean over instances, at the present homes without replicas.
        slices: the rules by which replicas follow while the step runs; None if the plan has them.
        planning_s: seconds from counting to the end of the plan's broadcast.
        ahead_s: seconds of counting and planning on the first rank, before, during the rollout.
        known_ahead: the part of the step's tokens from which homes and strategy were chosen then; 0 if they were not.
        nothing_s: predicted seconds of the step if nothing is done.
        parts_s: `predicted_s` by part.
        workload: workload of this rank's expert-parallel group; None if it was not gathered for planning.
        sequences: `[S]` uint64, `fingerprints` of the sequences of the schedule; None if they were not planned by
            `plan_sequences`.
    """

    schedule: Schedule
    plan: StepPlan
    strategy: str = "nothing"
    runner_up: str = ""
    predicted_s: float = 0.0
    predicted_gain: float = 0.0
    max_vio_before: float = 0.0
    slices: SliceRules | None = None
    planning_s: float = 0.0
    ahead_s: float = 0.0
    known_ahead: float = 0.0
    nothing_s: float = 0.0
    parts_s: Mapping[str, float] = field(default_factory=dict)
    workload: Workload | None = None
    sequences: Array | None = None


@dataclass(frozen=True)
class PlanReport:
    """Figures of a planned step.

    Where replicas are planned while the step runs (`is_sliced`), their number, `max_vio_after` and `peak_rows_after`
    are expectations; `Session.take_metrics` has the figures of what was planned.

    Attributes:
        is_sliced: whether replicas and split follow while the step runs.
        planning_s: seconds from counting to the end of the plan's broadcast.
        waited_s: seconds for which the step waited: these, and of applying the plan without moves.
        ahead_s: seconds of counting and planning ahead of the step, during the rollout, on the first rank.
        known_ahead: the part of the step's tokens from which homes and strategy were chosen then. If it is 0, they were
            chosen from all, or doing nothing was; the schedule always is of all.
        moving_s: seconds of moving experts to new homes.
        strategy: what the plan does, the strategy with the least predicted time.
        runner_up: the second best strategy; "" if there is no other.
        predicted_s: predicted seconds of the step.
        predicted_gain: predicted saving of the best strategy over doing nothing, as a fraction of the step. It is given
            also where it is too small for a plan to be executed.
        max_vio_before, max_vio_after: max/mean - 1 of rank loads, mean over instances, at the present homes and under
            the plan.
        replicas: replicas in all instances.
        homes_moved: experts that change rank, over all layers.
        micro_steps, unplanned_micro_steps: micro-steps of the step, and those that run without a plan.
        mixed_instances: instances with unknown routes, whose counts the ranks exchange.
        peak_rows_before, peak_rows_after: rows of the busiest rank in its busiest instance, at the present homes and
            under the plan.
        pool_bytes: bytes on a rank for replicas and arriving gradients, independent of the number of layers.
        mirror_bytes: bytes of the mirror of this rank's node.
        peer_memory_bytes: bytes of this rank's GPU memory that the other ranks of its node read replicas from. 0 if
            these are sent as messages, as on CPUs and where GPUs can't read each other's memory.
        free_bytes: free memory of the device.
    """

    is_sliced: bool
    planning_s: float
    waited_s: float
    ahead_s: float
    known_ahead: float
    moving_s: float
    strategy: str
    runner_up: str
    predicted_s: float
    predicted_gain: float
    max_vio_before: float
    max_vio_after: float
    replicas: int
    homes_moved: int
    micro_steps: int
    unplanned_micro_steps: int
    mixed_instances: int
    peak_rows_before: int
    peak_rows_after: int
    pool_bytes: int
    mirror_bytes: int
    peer_memory_bytes: int
    free_bytes: int
