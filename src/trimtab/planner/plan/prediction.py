"""Predicted time of a plan, the planner's objective: loads, bytes and cross-node rows, weighted by a `CostModel`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.cost import CostModel
from trimtab.planner.plan.row_counts import count_rows
from trimtab.planner.plan.step_plan import StepPlan
from trimtab.planner.plan.workload import Workload
from trimtab.planner.replicas.replica_table import ReplicaTable


@dataclass(frozen=True, eq=False)
class Prediction:
    """Loads and transfers of a plan by instance, and the predicted time.

    Attributes:
        busiest_ML: `[M, L]` int64, rows of the busiest rank.
        near_ML, far_ML: `[M, L]` int64, replicas on their home's node and on others.
        far_rows_ML: `[M, L]` int64, rows computed on another node than they come from.
        busiest_far_ML: `[M, L]` int64, of these the rows that leave or reach the busiest node, the larger of the two.
        seconds_ML: `[M, L]` float64, predicted time. Transfers are spread evenly over the ranks' links, rows between
            nodes over those of their node.
    """

    busiest_ML: Array
    near_ML: Array
    far_ML: Array
    far_rows_ML: Array
    busiest_far_ML: Array
    seconds_ML: Array


def predict(plan: StepPlan, workload: Workload, cost: CostModel, *, even: bool = False) -> Prediction:
    """Predicted time of every instance under a plan. Rows of unknown route are counted at their estimated experts.

    Args:
        even: treat rows as spread evenly over the ranks, independent of the plan: the ideal run.
    """
    return predict_layers(plan.replicas, plan.home, workload, cost, plan.ranks_per_node, even=even)


def predict_layers(
    replicas: ReplicaTable,
    home_LE: Array,
    workload: Workload,
    cost: CostModel,
    ranks_per_node: int,
    *,
    first_layer: int = 0,
    even: bool = False,
) -> Prediction:
    """Predicted time of every instance of L layers, `first_layer` of the workload and the next.

    Args:
        replicas: of M * L instances, those of a micro-step next to each other.
        home_LE: `[L, E]` int16, the homes of these layers.
    """
    rows = count_rows(workload.estimated_MLRE, first_layer, home_LE, replicas, ranks_per_node)
    shape = rows.loads_MLR.shape[:2]
    instances_P, is_far_P = replicas.instances_P, replicas.far_P(home_LE, ranks_per_node)
    near_ML, far_ML = (
        np.bincount(instances_P[chosen_P], minlength=shape[0] * shape[1]).reshape(shape)
        for chosen_P in (~is_far_P, is_far_P)
    )
    num_ranks = workload.num_ranks
    busiest_ML = -(-rows.loads_MLR.sum(axis=-1) // num_ranks) if even else rows.loads_MLR.max(axis=-1)
    out_MLN, in_MLN = _between_nodes(rows.between_MLNN)
    busiest_far_ML = np.maximum(out_MLN, in_MLN).max(axis=-1)
    seconds_ML = (
        cost.row_s * busiest_ML
        + cost.far_row_s * busiest_far_ML / ranks_per_node
        + (cost.near_replica_s * near_ML + cost.far_replica_s * far_ML) / num_ranks
    )
    return Prediction(busiest_ML, near_ML, far_ML, out_MLN.sum(axis=-1), busiest_far_ML, seconds_ML)


def cross_node_rows(plan: StepPlan, workload: Workload) -> Array:
    """Rows `[M, L]` int64 that are computed on another node than their source rank's; includes estimates."""
    return np.asarray(_between_nodes(plan.rows(workload).between_MLNN)[0].sum(axis=-1))


def _between_nodes(between_MLNN: Array) -> tuple[Array, Array]:
    """Rows that leave each node for another, and rows that reach it, both `[M, L, N]` int64."""
    own_MLN = np.diagonal(between_MLNN, axis1=2, axis2=3)
    return between_MLNN.sum(axis=3) - own_MLN, between_MLNN.sum(axis=2) - own_MLN
