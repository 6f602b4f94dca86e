"""Sequences grouped by routing compared with sequences packed by length."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from trimtab.benchmarks.planner_cases import PlannerCase
from trimtab.planner import Placement, PlanSettings, Schedule, plan_step
from trimtab.planner.placement.home_swaps import place_experts
from trimtab.planner.schedule.grouping import group_by_routing

THRESHOLDS = (1.005, 1.02)
SLOTS = 2


def schedule_figures(case: PlannerCase) -> list[dict[str, Any]]:
    """Expert time and replicas under both schedules, with the same homes, micro-steps and token budget.

    Homes are placed by the sums of the whole step, which favours neither schedule.
    """
    packed, cluster = case.schedule, case.cluster(SLOTS)
    totals_LE = case.sequences.counts_SLE.sum(axis=0, dtype=np.int64)
    home = [
        place_experts(totals_E[None], home_E, cluster.ranks, cluster.ranks_per_node)
        for totals_E, home_E in zip(totals_LE, case.contiguous.home, strict=True)
    ]
    homes = Placement(np.stack(home))
    start = time.perf_counter()
    grouped = group_by_routing(case.sequences, packed, homes, case.token_budget)
    seconds = time.perf_counter() - start

    def busiest(schedule: Schedule) -> int:
        return int(case.workload(schedule).home_loads(homes.home).max(axis=-1).sum())

    def replicas(schedule: Schedule, threshold: float) -> float:
        plan = plan_step(case.workload(schedule), schedule, homes, cluster, PlanSettings(threshold=threshold))
        return plan.num_replicas / (plan.num_micro_steps * plan.num_layers)

    return [
        {
            **case.key,
            "micro_steps": [packed.num_micro_steps, grouped.num_micro_steps],
            "expert_time_saved": 1 - busiest(grouped) / busiest(packed),
            "threshold": threshold,
            "replicas_by_length": replicas(packed, threshold),
            "replicas_by_routing": replicas(grouped, threshold),
            "seconds": seconds,
        }
        for threshold in THRESHOLDS
    ]
