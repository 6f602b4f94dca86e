"""Plan a step: run the levels below the schedule over every instance and join the result in a `StepPlan`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trimtab.cluster import ClusterSpec
from trimtab.errors import InputError
from trimtab.planner.placement import Placement
from trimtab.planner.replicas import place_replicas
from trimtab.planner.schedule import Schedule
from trimtab.planner.split import split_tokens
from trimtab.planner.step_plan import StepPlan
from trimtab.planner.workload import Workload
from trimtab.trace.routing import Array


@dataclass(frozen=True)
class PlanSettings:
    """How hard to balance.

    Attributes:
        threshold: max/mean load up to which an instance is left as it is.
        smallest_share: fewest tokens that a copy computes, so that its matrix multiplications stay efficient.
    """

    threshold: float = 1.02
    smallest_share: int = 128


def plan_step(
    workload: Workload,
    schedule: Schedule,
    placement: Placement,
    cluster: ClusterSpec,
    settings: PlanSettings | None = None,
) -> StepPlan:
    """Replicas and token split for every instance of a workload. Micro-steps that are not plannable get none.

    Raises:
        InputError: if workload and cluster differ in ranks.
    """
    if workload.num_ranks != cluster.ranks:
        raise InputError(f"the workload is for {workload.num_ranks} ranks; the cluster has {cluster.ranks}")
    settings = settings or PlanSettings()
    replicas: list[Array] = []
    quotas: list[Array] = []
    for micro_step in range(workload.num_micro_steps):
        for layer in range(workload.num_layers):
            instance = (
                _plan_instance(workload.token_counts_MLRE[micro_step, layer], placement.home[layer], cluster, settings)
                if workload.plannable[micro_step]
                else _NOTHING
            )
            replicas.append(instance[0])
            quotas.append(instance[1])
    return StepPlan.from_instances(
        schedule, placement, replicas, quotas, plannable=workload.plannable, slots_per_rank=cluster.slots_per_rank
    )


_NOTHING = (np.empty((0, 2), np.int64), np.empty((0, 0), np.int64))


def _plan_instance(
    counts_RE: Array, home_E: Array, cluster: ClusterSpec, settings: PlanSettings
) -> tuple[Array, Array]:
    """Replicas `[P, 2]` (expert, rank) of one instance and their quotas `[P, R]`."""
    counts_E = counts_RE.sum(axis=0, dtype=np.int64)
    mean_load = int(counts_E.sum()) / cluster.ranks
    experts_P, ranks_P, shares_P = np.empty((3, cluster.ranks * cluster.slots_per_rank), np.int64)
    count = place_replicas(
        counts_E,
        home_E,
        cluster.ranks,
        cluster.ranks_per_node,
        cluster.slots_per_rank,
        math.floor(mean_load * settings.threshold),
        settings.smallest_share,
        experts_P,
        ranks_P,
        shares_P,
    )
    experts_P, ranks_P, shares_P = experts_P[:count], ranks_P[:count], shares_P[:count]
    quotas_PR = np.zeros((count, cluster.ranks), np.int64)
    split_tokens(counts_RE, home_E, cluster.ranks_per_node, experts_P, ranks_P, shares_P, quotas_PR)
    return np.stack([experts_P, ranks_P], axis=1), quotas_PR
