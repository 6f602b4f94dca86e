"""Estimated cost of imbalance in seconds of a step, with the simulator's costs.

Costs are those of `cluster/operations.py`, added up. All ranks synchronise in every all-to-all, so an instance takes
the busiest rank's expert time, twice the time of its all-to-all (dispatch and combine), and the dense
parts, which are even; and a step one optimizer step. Rows are assumed to come evenly from all ranks. Overlap is
modelled only by `trimtab simulate`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.analysis.balance import home_loads
from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, ModelSpec
from trimtab.cluster.operations import OperationCosts


@dataclass(frozen=True)
class CostEstimate:
    """Seconds of recompute and update, mean over steps; of the whole model, also if the trace has fewer layers.

    Attributes:
        cluster, model: names.
        step_s: with contiguous homes.
        lost_s: the part that even loads would save: experts, and rows through the busiest rank's all-to-all.
        lost_s_by_layer: the same by MoE layer of the trace, each as it is.
        layers_of_model: its MoE layers; the trace has those of `lost_s_by_layer`.
    """

    cluster: str
    model: str
    step_s: float
    lost_s: float
    lost_s_by_layer: tuple[float, ...]
    layers_of_model: int

    @property
    def layers_traced(self) -> int:
        return len(self.lost_s_by_layer)

    @property
    def lost_part(self) -> float:
        """Part of the step's time that imbalance costs, 0 to 1."""
        return self.lost_s / self.step_s if self.step_s else 0.0


def estimate_cost(
    counts_MLE: Array,
    cluster: ClusterSpec,
    model: ModelSpec,
    *,
    num_steps: int,
    lengths: Array,
) -> CostEstimate:
    """Estimated seconds of recompute and update, and the part of them that imbalance costs.

    Args:
        counts_MLE: `[M, L, E]` integers, tokens by micro-step, layer and expert.
        lengths: tokens of all sequences.
    """
    num_micro_steps, num_layers, _ = counts_MLE.shape
    costs = OperationCosts.of(cluster, model, moe_layers=num_layers)
    # Recompute and update run forward once each; backward's experts and dense parts take longer, its rows do not.
    experts, dense, rows = 2 + costs.expert_backward, 2 + costs.dense_backward, 3
    near, far = _parts_sent(costs, cluster)
    even_row_s = max(near * costs.even_near_row_s, far * costs.even_far_row_s)
    busiest_L, even_L = np.zeros(num_layers), np.zeros(num_layers)
    for layer in range(num_layers):
        counts_ME = counts_MLE[:, layer]
        work_MR = home_loads(costs.copy_seconds(counts_ME), cluster.ranks)
        mean_M = counts_ME.sum(axis=1) / cluster.ranks
        to_rank_MR, to_node_MR = _entering(counts_ME, costs, cluster)
        exchange_MR = np.maximum(near * costs.near_row_s * to_rank_MR, far * costs.far_row_s * to_node_MR)
        busiest_L[layer] = experts * work_MR.max(axis=-1).sum() + 2 * rows * exchange_MR.max(axis=-1).sum()
        even_L[layer] = experts * work_MR.mean(axis=-1).sum() + 2 * rows * even_row_s * mean_M.sum()
    amounts = (lengths, np.square(lengths), costs.pairs_within_reach(lengths))
    tokens, squares, near = (amount.sum() / cluster.ranks for amount in amounts)
    fixed_s = num_micro_steps * (num_layers * (dense * costs.layer_s + 2 * rows * costs.dispatch_s))
    dense_s = dense * (
        tokens * (num_layers * costs.token_s + costs.outer_token_s)
        + squares * (num_layers * costs.square_s + costs.outer_square_s)
        + near * (num_layers * costs.reach_s + costs.outer_reach_s)
        + num_micro_steps * costs.outer_s
    )
    lost_L = (busiest_L - even_L) / num_steps
    step_s = (float(busiest_L.sum()) + fixed_s + dense_s) / num_steps + costs.optimizer_s
    scale = model.moe_layers / num_layers
    return CostEstimate(
        cluster.name,
        model.name,
        scale * step_s,
        scale * float(lost_L.sum()),
        tuple(lost_L.tolist()),
        model.moe_layers,
    )


def _entering(counts_ME: Array, costs: OperationCosts, cluster: ClusterSpec) -> tuple[Array, Array]:
    """Transfers `[M, R]` of all ranks to each rank, and to its link between nodes, with contiguous homes."""
    places_MR, places_MN = (costs.transfers(counts_ME, places) for places in (cluster.ranks, cluster.nodes))
    if not costs.forwards:
        return places_MR, places_MR
    # What comes from other nodes arrives at the rank with the source's local index, so evenly over the node.
    return places_MR, np.repeat(places_MN / cluster.ranks_per_node, cluster.ranks_per_node, axis=1)


def _parts_sent(costs: OperationCosts, cluster: ClusterSpec) -> tuple[float, float]:
    """Of what goes to a rank, the parts that links inside the node and between nodes carry, if all ranks send alike."""
    near = (cluster.ranks_per_node - 1) / cluster.ranks
    far = (cluster.ranks - cluster.ranks_per_node) / cluster.ranks
    if costs.forwards:
        near += far * (cluster.ranks_per_node - 1) / cluster.ranks_per_node
    return near, far
