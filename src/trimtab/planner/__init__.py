"""The planner: schedule, placement, replicas and token split of one step, joined in a `StepPlan`."""

from trimtab.planner.placement.expert_order import order_experts
from trimtab.planner.placement.placement import Placement
from trimtab.planner.plan.plan_settings import PlanSettings
from trimtab.planner.plan.planned_step import PlannedStep
from trimtab.planner.plan.step_plan import StepPlan
from trimtab.planner.plan.step_planning import plan_step
from trimtab.planner.plan.workload import Workload
from trimtab.planner.planner import Planner, plan_schedule, plan_sequences
from trimtab.planner.schedule.schedule import Schedule, pack_by_length
from trimtab.planner.schedule.sequence_counts import SequenceCounts
from trimtab.planner.schedule.token_budget import budget_for

# An older name.
GroupPlans = PlannedStep

__all__ = [
    "GroupPlans",
    "Placement",
    "PlanSettings",
    "PlannedStep",
    "Planner",
    "Schedule",
    "SequenceCounts",
    "StepPlan",
    "Workload",
    "budget_for",
    "order_experts",
    "pack_by_length",
    "plan_schedule",
    "plan_sequences",
    "plan_step",
]
