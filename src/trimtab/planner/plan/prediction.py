"""Predicted time of a plan, the planner's objective: loads, bytes and cross-node rows, weighted by a `CostModel`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.cost import CostModel
from trimtab.planner.plan.step_plan import StepPlan
from trimtab.planner.plan.workload import Workload


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
    shape = (plan.num_micro_steps, plan.num_layers)
    instance = np.repeat(np.arange(shape[0] * shape[1]), np.diff(plan.replica_starts))
    is_far = plan.far_replicas
    near_ML = np.bincount(instance[~is_far], minlength=shape[0] * shape[1]).reshape(shape)
    far_ML = np.bincount(instance[is_far], minlength=shape[0] * shape[1]).reshape(shape)
    loads_MLR, between_MLNN = plan.rows(workload)
    busiest_ML = -(-loads_MLR.sum(axis=-1) // plan.num_ranks) if even else loads_MLR.max(axis=-1)
    out_MLN, in_MLN = _between_nodes(between_MLNN)
    busiest_far_ML = np.maximum(out_MLN, in_MLN).max(axis=-1)
    seconds_ML = (
        cost.row_s * busiest_ML
        + cost.far_row_s * busiest_far_ML / plan.ranks_per_node
        + (cost.near_replica_s * near_ML + cost.far_replica_s * far_ML) / plan.num_ranks
    )
    return Prediction(busiest_ML, near_ML, far_ML, out_MLN.sum(axis=-1), busiest_far_ML, seconds_ML)


def cross_node_rows(plan: StepPlan, workload: Workload) -> Array:
    """Rows `[M, L]` int64 that are computed on another node than their source rank's; includes estimates."""
    return np.asarray(_between_nodes(plan.rows(workload)[1])[0].sum(axis=-1))


def _between_nodes(between_MLNN: Array) -> tuple[Array, Array]:
    """Rows that leave each node for another, and rows that reach it, both `[M, L, N]` int64."""
    stay_MLN = np.diagonal(between_MLNN, axis1=2, axis2=3)
    return between_MLNN.sum(axis=3) - stay_MLN, between_MLNN.sum(axis=2) - stay_MLN
