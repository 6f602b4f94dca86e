"""`LiveCounts` and `LivePrediction`: Trimtab's live mode, which needs no recorded routing (docs/live.md).

Both split a layer's rows by its own counts, once its router has chosen. `LiveCounts` also chooses replicas by them
(policy `quota`); `LivePrediction` chooses replicas before, by the average of earlier counts (`predict`, `average`). No
time of choosing is published for them: each layer is charged UltraEP's. Weights of predicted replicas that get no rows
are not charged.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from trimtab.array_type import Array
from trimtab.planner import PlanSettings, StepPlan
from trimtab.planner.replicas.instance_choice import choose_replicas, split_over_replicas
from trimtab.policies.planning_time import ULTRAEP_SIZES, PlanningTime
from trimtab.policies.policy import Traits, View

# The part of the newest counts in the average, as 1 / this: `runtime.live.balancer.AVERAGED`.
AVERAGED = 4
_CHOOSING = PlanningTime.published(*ULTRAEP_SIZES, source="UltraEP's README")


@dataclass(frozen=True)
class LiveCounts:
    """Replicas and split of each layer from its own counts."""

    traits: ClassVar[Traits] = Traits(known_at="layer", planning=_CHOOSING)
    settings: PlanSettings = field(default_factory=PlanSettings)

    def plan(self, view: View) -> StepPlan:
        limits = self.settings.limits(view.cluster)

        def plan_one(_: int, counts_RE: Array, home_E: Array) -> tuple[Array, Array]:
            experts_P, ranks_P, quotas_PR = choose_replicas(counts_RE, home_E.astype(np.int16), limits)
            return np.stack([experts_P, ranks_P], axis=1).astype(np.int64), quotas_PR

        return view.plan_instances(plan_one, placement=view.placement, slots=view.cluster.slots_per_rank)


@dataclass(frozen=True)
class LivePrediction:
    """Replicas of each layer from the average of its earlier counts, and split from its own.

    The plan's settings have `hit_rate`, the part of the predicted replicas that got rows.
    """

    traits: ClassVar[Traits] = Traits(known_at="layer", planning=_CHOOSING, transfers_start="micro-step")
    settings: PlanSettings = field(default_factory=PlanSettings)

    def plan(self, view: View) -> StepPlan:
        limits = self.settings.limits(view.cluster)
        past: dict[int, Array] = {}
        predicted, used = 0, 0

        def plan_one(layer: int, counts_RE: Array, home_E: Array) -> tuple[Array, Array]:
            nonlocal predicted, used
            before_RE = past.get(layer)
            past[layer] = counts_RE if before_RE is None else before_RE + (counts_RE - before_RE) // AVERAGED
            if before_RE is None:
                return np.empty((0, 2), np.int64), np.empty((0, len(counts_RE)), np.int64)
            home_E = home_E.astype(np.int16)
            experts_P, ranks_P, _ = choose_replicas(before_RE, home_E, limits)
            quotas_PR = split_over_replicas(experts_P, ranks_P, counts_RE, home_E, limits)
            predicted += len(experts_P)
            used += int(np.count_nonzero(quotas_PR.sum(axis=1)))
            return np.stack([experts_P, ranks_P], axis=1).astype(np.int64), quotas_PR

        plan = view.plan_instances(plan_one, placement=view.placement, slots=view.cluster.slots_per_rank)
        return replace(plan, settings=json.dumps({"hit_rate": used / max(1, predicted)}))
