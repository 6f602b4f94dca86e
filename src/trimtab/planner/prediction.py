"""How long would a plan take? The planner's objective: loads, bytes and cross-node rows, weighed by a `CostModel`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.cluster.cost import CostModel
from trimtab.planner.step_plan import StepPlan
from trimtab.planner.workload import Workload
from trimtab.trace.routing import Array


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a plan asks of the cluster, by instance, and the time that it comes to.

    Attributes:
        busiest_ML: `[M, L]` int64, rows of the busiest rank.
        near_ML, far_ML: `[M, L]` int64, replicas on their home's node and on others.
        far_rows_ML: `[M, L]` int64, rows computed on another node than they come from.
        busiest_far_ML: `[M, L]` int64, of these the rows that leave or reach the busiest node, whichever are more.
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
    """Predicted time of every instance under a plan.

    Args:
        even: take the rows as spread evenly over the ranks, whatever the plan says: the ideal run.
    """
    shape = (plan.num_micro_steps, plan.num_layers)
    instance = np.repeat(np.arange(shape[0] * shape[1]), np.diff(plan.replica_starts))
    is_far = plan.far_replicas
    near_ML = np.bincount(instance[~is_far], minlength=shape[0] * shape[1]).reshape(shape)
    far_ML = np.bincount(instance[is_far], minlength=shape[0] * shape[1]).reshape(shape)
    loads_MLR = plan.rank_loads(workload)
    busiest_ML = -(-loads_MLR.sum(axis=-1) // plan.num_ranks) if even else loads_MLR.max(axis=-1)
    out_MLN, in_MLN = _rows_over_nodes(plan, workload)
    busiest_far_ML = np.maximum(out_MLN, in_MLN).max(axis=-1)
    seconds_ML = (
        cost.row_s * busiest_ML
        + cost.far_row_s * busiest_far_ML / plan.ranks_per_node
        + (cost.near_replica_s * near_ML + cost.far_replica_s * far_ML) / plan.num_ranks
    )
    return Prediction(busiest_ML, near_ML, far_ML, out_MLN.sum(axis=-1), busiest_far_ML, seconds_ML)


def cross_node_rows(plan: StepPlan, workload: Workload) -> Array:
    """Rows `[M, L]` int64 whose expert computes them on another node than their source rank's."""
    return np.asarray(_rows_over_nodes(plan, workload)[0].sum(axis=-1))


def _rows_over_nodes(plan: StepPlan, workload: Workload) -> tuple[Array, Array]:
    """Rows that leave each node for another, and rows that reach it, both `[M, L, N]` int64."""
    num_nodes = plan.num_ranks // plan.ranks_per_node
    shape = (plan.num_micro_steps, plan.num_layers, num_nodes)
    if num_nodes == 1:
        return np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    # From node to node, the latter being the homes'; then quotas change where some go.
    rows_MLNN = np.empty((*shape, num_nodes), np.int64)
    for layer in range(plan.num_layers):
        counts_MRE = workload.token_counts_MLRE[:, layer]
        counts_MNE = counts_MRE.reshape(shape[0], num_nodes, plan.ranks_per_node, -1).sum(axis=2, dtype=np.int64)
        for node in range(num_nodes):
            homes = plan.home[layer] // plan.ranks_per_node == node
            rows_MLNN[:, layer, :, node] = counts_MNE[:, :, homes].sum(axis=-1)
    replica = np.repeat(np.arange(plan.num_replicas), np.diff(plan.quota_starts))
    instance = np.repeat(np.arange(shape[0] * shape[1]), np.diff(plan.replica_starts))[replica]
    source = instance * num_nodes + plan.quota_sources // plan.ranks_per_node
    home = plan.home[instance % shape[1], plan.replica_experts[replica]] // plan.ranks_per_node
    rank = plan.replica_ranks[replica] // plan.ranks_per_node
    for sign, node in ((-1, home), (1, rank)):
        # Sums of whole numbers below 2^53 are exact as floats.
        moved = np.bincount(source * num_nodes + node, plan.quota_tokens, minlength=rows_MLNN.size)
        rows_MLNN += sign * moved.astype(np.int64).reshape(rows_MLNN.shape)
    rows_MLNN[:, :, np.arange(num_nodes), np.arange(num_nodes)] = 0
    return rows_MLNN.sum(axis=3), rows_MLNN.sum(axis=2)
