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
        seconds_ML: `[M, L]` float64, predicted time. Transfers are spread evenly over the ranks' links.
    """

    busiest_ML: Array
    near_ML: Array
    far_ML: Array
    far_rows_ML: Array
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
    far_rows_ML = cross_node_rows(plan, workload)
    transfers = cost.near_replica_s * near_ML + cost.far_replica_s * far_ML + cost.far_row_s * far_rows_ML
    return Prediction(busiest_ML, near_ML, far_ML, far_rows_ML, cost.row_s * busiest_ML + transfers / plan.num_ranks)


def cross_node_rows(plan: StepPlan, workload: Workload) -> Array:
    """Rows `[M, L]` int64 whose expert computes them on another node than their source rank's."""
    num_nodes = plan.num_ranks // plan.ranks_per_node
    shape = (plan.num_micro_steps, plan.num_layers)
    if num_nodes == 1:
        return np.zeros(shape, np.int64)
    far_ML = np.empty(shape, np.int64)
    for layer in range(plan.num_layers):
        counts_MRE = workload.token_counts_MLRE[:, layer]
        near_M = np.zeros(shape[0], np.int64)
        for node in range(num_nodes):
            mine = slice(node * plan.ranks_per_node, (node + 1) * plan.ranks_per_node)
            homes = plan.home[layer] // plan.ranks_per_node == node
            near_M += counts_MRE[:, mine][:, :, homes].sum(axis=(1, 2), dtype=np.int64)
        far_ML[:, layer] = counts_MRE.sum(axis=(1, 2), dtype=np.int64) - near_M
    replica = np.repeat(np.arange(plan.num_replicas), np.diff(plan.quota_starts))
    instance = np.repeat(np.arange(shape[0] * shape[1]), np.diff(plan.replica_starts))[replica]
    source = plan.quota_sources // plan.ranks_per_node
    at_home = plan.home[instance % shape[1], plan.replica_experts[replica]] // plan.ranks_per_node == source
    at_replica = plan.replica_ranks[replica] // plan.ranks_per_node == source
    change = plan.quota_tokens.astype(np.int64) * (at_home.astype(np.int64) - at_replica)
    return far_ML + np.bincount(instance, change, minlength=far_ML.size).astype(np.int64).reshape(shape)
