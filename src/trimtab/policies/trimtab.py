"""`trimtab`: this project's balancer. It plans all levels from the known routing of the step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from trimtab.planner import PlanSettings, StepPlan, plan_sequences, plan_step
from trimtab.policies.planning_time import PlanningTime
from trimtab.policies.policy import Traits, View


@dataclass(frozen=True)
class Trimtab:
    """Schedule, homes, replicas and split from the step's own routing; on equal terms only replicas and split.

    Attributes:
        settings: of the planner.
        may_move: whether homes may change.
        slots: numbers of slots of a rank, one of which the next plan chooses; the cluster's if there are none.
    """

    traits: ClassVar[Traits] = Traits(
        known_at="step",
        planning=PlanningTime.measured("trimtab"),
        transfers_start="micro-step",
        host_path=True,
        relocates=True,
    )
    settings: PlanSettings = field(default_factory=PlanSettings)
    may_move: bool = True
    slots: tuple[int, ...] = ()

    def plan(self, view: View) -> StepPlan:
        if view.equal_terms:
            return plan_step(view.workload, view.schedule, view.placement, view.cluster, self.settings)
        (plan,) = plan_sequences(
            view.sequences,
            view.placement,
            view.cluster,
            token_budget=view.token_budget,
            mini_batch=view.mini_batch,
            settings=self.settings,
            costs=view.costs,
            past_PLE=view.past_counts_PLE if len(view.past_counts_PLE) else None,
            may_move=self.may_move,
            slots=self.slots,
        ).plans
        return plan
