"""`trimtab`: replicas in spare slots for every instance, from the step's own loads, with a locality-first split."""

from __future__ import annotations

from trimtab.cluster import ClusterSpec
from trimtab.planner import Placement, Schedule, StepPlan, Workload, plan_step


def plan_trimtab(workload: Workload, schedule: Schedule, cluster: ClusterSpec) -> StepPlan:
    """Contiguous homes, replicas and quotas. Raises InputError if the ranks don't divide the experts."""
    placement = Placement.contiguous(workload.num_layers, workload.num_experts, workload.num_ranks)
    return plan_step(workload, schedule, placement, cluster)
