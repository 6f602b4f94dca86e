"""Replicas of Trimtab's plans compared with the fewest possible."""

from __future__ import annotations

from typing import Any

import numpy as np

from trimtab.benchmarks.planner_cases import SMALLEST_SHARE, PlannerCase
from trimtab.planner import PlanSettings, plan_step
from trimtab.planner.plan.bounds import evenly_spread, fewest_replicas

THRESHOLD = 1.02
SLOTS = 2


def milp_figures(case: PlannerCase, homes: str, sampled: int) -> dict[str, Any]:
    """Replicas of the planner, and the fewest that reach the same max/mean at the same homes, solved as a MILP.

    Args:
        homes: "own" (those that Trimtab's last plan left) or "contiguous".
        sampled: number of instances that are solved.
    """
    workload = case.workload(case.schedule)
    settings = PlanSettings(threshold=THRESHOLD, smallest_share=SMALLEST_SHARE)
    placement = case.warm if homes == "own" else case.contiguous
    plan = plan_step(workload, case.schedule, placement, case.cluster(SLOTS), settings)
    loads_IR = plan.rank_loads(workload).reshape(-1, plan.num_ranks)
    replicas = fewest = solved = 0
    for instance in evenly_spread(len(loads_IR), sampled):
        micro_step, layer = divmod(instance, plan.num_layers)
        counts_E = workload.token_counts_MLRE[micro_step, layer].sum(axis=0, dtype=np.int64)
        limit = int(counts_E.sum() * THRESHOLD / plan.num_ranks)
        least = fewest_replicas(counts_E, plan.home[layer], plan.num_ranks, SLOTS, limit, SMALLEST_SHARE)
        if least is not None and loads_IR[instance].max() <= limit:
            solved += 1
            fewest += least
            replicas += len(plan.replicas_of(micro_step, layer))
    return {
        **case.key,
        "homes": homes,
        "threshold": THRESHOLD,
        "sampled": sampled,
        "solved": solved,
        "replicas": replicas,
        "fewest": fewest,
    }
