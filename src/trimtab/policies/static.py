"""`static`: plain expert parallelism, contiguous homes and nothing else. What every gain is measured against."""

from __future__ import annotations

from dataclasses import replace

from trimtab.cluster import ClusterSpec
from trimtab.planner import Placement, Schedule, StepPlan, Workload, plan_step


def plan_static(workload: Workload, schedule: Schedule, cluster: ClusterSpec) -> StepPlan:
    """Every expert at its contiguous home, no replicas. Raises InputError if the ranks don't divide the experts."""
    placement = Placement.contiguous(workload.num_layers, workload.num_experts, workload.num_ranks)
    return plan_step(workload, schedule, placement, replace(cluster, slots_per_rank=0))
