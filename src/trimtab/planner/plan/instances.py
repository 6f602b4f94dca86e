"""Replicas and split of every instance, layer by layer, joined in a `StepPlan`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from trimtab.cluster import ClusterSpec
from trimtab.errors import InputError
from trimtab.planner.placement.placement import Placement
from trimtab.planner.plan.expert_loads import ExpertLoads
from trimtab.planner.plan.plan_settings import PlanSettings
from trimtab.planner.plan.row_limits import keeps_to, refuse, require_known_routes
from trimtab.planner.plan.step_plan import StepPlan
from trimtab.planner.plan.workload import Workload
from trimtab.planner.replicas.layer_plan import plan_layer
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.planner.schedule.schedule import Schedule

Result = TypeVar("Result")


def plan_step(
    workload: Workload,
    schedule: Schedule,
    placement: Placement,
    cluster: ClusterSpec,
    settings: PlanSettings | None = None,
    *,
    threads: int = 1,
) -> StepPlan:
    """Replicas and token split for every instance of a workload.

    Replicas take known rows only. Unknown rows are estimated at the homes (`Workload.expected_loads`), and known rows
    are split so that the sum of both is even.

    Args:
        threads: layers planned at the same time. The plan does not depend on it.

    Raises:
        InputError: if workload and cluster differ in ranks, or the step can't keep to limits of rows.
    """
    if workload.num_ranks != cluster.ranks:
        raise InputError(f"the workload is for {workload.num_ranks} ranks; the cluster has {cluster.ranks}")
    chosen = settings or PlanSettings()
    require_known_routes(chosen, [workload.mixed_ML])
    fixed_MLR = workload.expected_loads(placement.home)

    def plan_with(settings: PlanSettings) -> StepPlan:
        limits = settings.limits(cluster)

        def plan_one(layer: int) -> ReplicaTable:
            home_E = placement.home[layer]
            return plan_layer(workload.token_counts_MLRE, fixed_MLR[:, layer], layer, home_E, limits)

        replicas = ReplicaTable.join_layers(map_layers(plan_one, workload.num_layers, threads))
        return StepPlan.from_replicas(
            schedule, placement, replicas, mixed_ML=workload.mixed_ML, cluster=cluster, settings=settings.to_json()
        )

    plan = plan_with(chosen)
    if chosen.limits_rows and not keeps_to(chosen, [plan.rank_loads(workload)]):
        raise refuse(chosen, cluster.slots_per_rank, lambda settings: [plan_with(settings).rank_loads(workload)])
    return plan


def plan_homes(
    load: ExpertLoads, schedule: Schedule, placement: Placement, cluster: ClusterSpec, settings: PlanSettings
) -> StepPlan:
    """`plan_step` without slots, for which the rows of source ranks are not needed."""
    require_known_routes(settings, [load.mixed_ML])
    loads_MLR = load.home_loads(placement.home)
    if not keeps_to(settings, [loads_MLR]):
        raise refuse(settings, 0, lambda _: [loads_MLR])
    return StepPlan.from_replicas(
        schedule, placement, ReplicaTable.none(load.mixed_ML.size), mixed_ML=load.mixed_ML,
        cluster=replace(cluster, slots_per_rank=0), settings=settings.to_json(),
    )  # fmt: skip


def map_layers(task: Callable[[int], Result], num_layers: int, threads: int) -> list[Result]:
    """Runs a task for every layer, `threads` at a time; returns the results in layer order."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(task, range(num_layers)))
