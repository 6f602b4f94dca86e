"""The planner: schedule, placement, replicas and token split of one step, joined in a `StepPlan`."""

from trimtab.planner.instances import PlanSettings, plan_step
from trimtab.planner.placement import Placement
from trimtab.planner.planner import Planner, plan_schedule, plan_sequences
from trimtab.planner.schedule import Schedule, pack_by_length
from trimtab.planner.sequences import SequenceCounts
from trimtab.planner.step_plan import StepPlan
from trimtab.planner.workload import Workload

__all__ = [
    "Placement",
    "PlanSettings",
    "Planner",
    "Schedule",
    "SequenceCounts",
    "StepPlan",
    "Workload",
    "pack_by_length",
    "plan_schedule",
    "plan_sequences",
    "plan_step",
]
