"""Homes with the least predicted time, and the replicas on them.

Every candidate is planned completely, layer by layer. A layer's replicas are planned once for all candidates with the
same homes, and those of the cheapest candidate are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, CostModel
from trimtab.planner.placement.placement import Placement
from trimtab.planner.plan.instances import map_layers
from trimtab.planner.plan.plan_settings import PlanSettings
from trimtab.planner.plan.prediction import predict_layers
from trimtab.planner.plan.workload import Workload
from trimtab.planner.replicas.layer_plan import plan_layer, split_layer
from trimtab.planner.replicas.replica_table import ReplicaTable

# Steps over which the cost of a move is spread. The load of a step changes slowly, so good homes stay good; but moves
# load links unevenly, and some are undone soon.
STEPS_TO_PAY = 4
# The part of a replica's transfer that is assumed not to overlap with compute, when deciding on replicas for an
# instance.
EXPOSED = 0.1


@dataclass(frozen=True, eq=False)
class HomeChoice:
    """Homes, and replicas on them for every instance.

    Attributes:
        placement: the homes.
        layers_LG: replicas of M micro-steps, for every layer and expert-parallel group.
    """

    placement: Placement
    layers_LG: list[list[ReplicaTable]]

    def group(self, group: int) -> ReplicaTable:
        """Replicas of all instances of an expert-parallel group."""
        return ReplicaTable.join_layers([layers_G[group] for layers_G in self.layers_LG])


def choose_homes(
    workloads: Sequence[Workload],
    candidates: Sequence[Placement],
    cluster: ClusterSpec,
    settings: PlanSettings,
    cost: CostModel,
    threads: int,
) -> HomeChoice:
    """For every layer the candidate with the least predicted time, with all replicas that balance.

    Args:
        workloads: of each expert-parallel group.
        candidates: the first are the present homes, from which experts move.
    """
    limits = settings.limits(cluster)
    fixed_CG = [[workload.expected_loads(homes.home) for workload in workloads] for homes in candidates]
    for workload in workloads:
        workload.estimated_MLRE  # noqa: B018  computed once, before the threads need it

    def plan_one(layer: int) -> tuple[list[list[ReplicaTable]], Array]:
        """Replicas and seconds `[G, M]` of every candidate."""
        planned: dict[bytes, tuple[list[ReplicaTable], list[Array]]] = {}
        for homes, fixed_G in zip(candidates, fixed_CG, strict=True):
            home_E = homes.home[layer]
            if home_E.tobytes() in planned:
                continue
            replicas_G = [
                plan_layer(workload.token_counts_MLRE, fixed_MLR[:, layer], layer, home_E, limits)
                for workload, fixed_MLR in zip(workloads, fixed_G, strict=True)
            ]
            seconds_G = [
                _seconds(replicas, home_E, workload, layer, cluster, cost)
                for replicas, workload in zip(replicas_G, workloads, strict=True)
            ]
            planned[home_E.tobytes()] = replicas_G, seconds_G
        chosen = [planned[homes.home[layer].tobytes()] for homes in candidates]
        return [replicas for replicas, _ in chosen], np.array([seconds for _, seconds in chosen])

    layers = map_layers(plan_one, len(candidates[0].home), threads)
    seconds_CL = np.stack([seconds_CGM for _, seconds_CGM in layers], axis=-1).sum(axis=2).sum(axis=1)
    for seconds_L, homes in zip(seconds_CL, candidates, strict=True):
        near_L, far_L = candidates[0].moves(homes, cluster.ranks_per_node)
        seconds_L += (cost.near_move_s * near_L + cost.far_move_s * far_L) / (cluster.ranks * STEPS_TO_PAY)
    # Integer nanoseconds, so the choice does not depend on the order of summation.
    best_L = np.rint(seconds_CL * 1e9).argmin(axis=0)
    home_LE = np.stack([candidates[best].home[layer] for layer, best in enumerate(best_L)])
    return HomeChoice(
        Placement(home_LE), [replicas_CG[best] for best, (replicas_CG, _) in zip(best_L, layers, strict=True)]
    )


def drop_costly_replicas(
    choice: HomeChoice, workloads: Sequence[Workload], cluster: ClusterSpec, cost: CostModel, threads: int
) -> HomeChoice:
    """Returns the same homes, without the replicas of instances that are predicted to be slower with replicas.

    Most of the transfer is assumed to overlap with compute. Instances don't depend on each other, so the plan is that
    of planning only the others.
    """
    exposed = replace(cost, near_replica_s=EXPOSED * cost.near_replica_s, far_replica_s=EXPOSED * cost.far_replica_s)

    def drop_in(layer: int) -> list[ReplicaTable]:
        home_E = choice.placement.home[layer]
        kept = []
        for replicas, workload in zip(choice.layers_LG[layer], workloads, strict=True):
            every = np.arange(workload.num_micro_steps)
            with_M = _seconds(replicas, home_E, workload, layer, cluster, exposed)
            without_M = _seconds(replicas.select(every, False), home_E, workload, layer, cluster, cost)
            kept.append(replicas.select(every, np.rint(with_M * 1e9) <= np.rint(without_M * 1e9)))
        return kept

    return replace(choice, layers_LG=map_layers(drop_in, len(choice.layers_LG), threads))


def split_again(
    choice: HomeChoice, order: Array, workloads: Sequence[Workload], cluster: ClusterSpec, threads: int
) -> HomeChoice:
    """Returns the same replicas and shares, split for other source ranks of the tokens.

    Args:
        order: `[M]` integers; micro-step `order[m]` of the choice is micro-step m of the workloads.
        workloads: with the same tokens by micro-step and expert.
    """

    def split_one(layer: int) -> list[ReplicaTable]:
        home_E = choice.placement.home[layer]
        return [
            split_layer(workload.token_counts_MLRE, layer, home_E, cluster.ranks_per_node, replicas.select(order))
            for replicas, workload in zip(choice.layers_LG[layer], workloads, strict=True)
        ]

    return replace(choice, layers_LG=map_layers(split_one, len(choice.layers_LG), threads))


def _seconds(
    replicas: ReplicaTable, home_E: Array, workload: Workload, layer: int, cluster: ClusterSpec, cost: CostModel
) -> Array:
    """Predicted time `[M]` of one layer's instances."""
    found = predict_layers(replicas, home_E[None], workload, cost, cluster.ranks_per_node, first_layer=layer)
    return found.seconds_ML[:, 0]
