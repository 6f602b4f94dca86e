"""Replicas and split of every instance, layer by layer, joined in a `StepPlan`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec
from trimtab.errors import InputError
from trimtab.planner.placement.placement import Placement
from trimtab.planner.plan.step_plan import StepPlan
from trimtab.planner.plan.workload import Workload
from trimtab.planner.replicas.layer_plan import LayerPlan, plan_layer
from trimtab.planner.schedule.schedule import Schedule

Result = TypeVar("Result")


@dataclass(frozen=True)
class PlanSettings:
    """Settings of replicas and split.

    Attributes:
        threshold: max/mean load up to which an instance is not changed.
        smallest_share: fewest tokens that a copy computes, for efficient matrix products.

    Raises:
        InputError: if either is below 1.
    """

    threshold: float = 1.005
    smallest_share: int = 128

    def __post_init__(self) -> None:
        if not 1 <= self.threshold < math.inf:
            raise InputError(f"the threshold is {self.threshold}; it should be a max/mean load of 1 or more")
        if self.smallest_share < 1:
            raise InputError(f"the smallest share is {self.smallest_share}; it should be 1 token or more")


def plan_step(
    workload: Workload,
    schedule: Schedule,
    placement: Placement,
    cluster: ClusterSpec,
    settings: PlanSettings | None = None,
    *,
    worth_ML: Array | None = None,
    threads: int = 1,
) -> StepPlan:
    """Replicas and token split for every instance of a workload.

    Replicas take known rows only. Unknown rows are estimated at the homes (`Workload.expected_loads`), and known rows
    are split so that the sum of both is even.

    Args:
        worth_ML: `[M, L]` bool, instances in which replicas reduce the predicted time; all by default.
        threads: layers planned at the same time. The plan does not depend on it.

    Raises:
        InputError: if workload and cluster differ in ranks.
    """
    if workload.num_ranks != cluster.ranks:
        raise InputError(f"the workload is for {workload.num_ranks} ranks; the cluster has {cluster.ranks}")
    chosen = settings or PlanSettings()
    expected_MLR = workload.expected_loads(placement.home)
    wanted_ML = np.ones((workload.num_micro_steps, workload.num_layers), bool) if worth_ML is None else worth_ML

    def plan_one(layer: int) -> LayerPlan:
        return plan_layer(
            workload.token_counts_MLRE,
            expected_MLR[:, layer],
            layer,
            np.ascontiguousarray(wanted_ML[:, layer]),
            placement.home[layer],
            ranks_per_node=cluster.ranks_per_node,
            slots=cluster.slots_per_rank,
            threshold=chosen.threshold,
            smallest_share=chosen.smallest_share,
        )

    return StepPlan.from_layers(
        schedule,
        placement,
        map_layers(plan_one, workload.num_layers, threads),
        mixed_ML=workload.mixed_ML,
        cluster=cluster,
        settings=json.dumps({"threshold": float(chosen.threshold), "smallest_share": int(chosen.smallest_share)}),
    )


def map_layers(task: Callable[[int], Result], num_layers: int, threads: int) -> list[Result]:
    """Runs a task for every layer, `threads` at a time; returns the results in layer order."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(task, range(num_layers)))
