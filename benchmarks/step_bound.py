"""A lower bound of a step's time, by part, for all plans that use the same schedule and number of slots.

The simulator's ranks wait for each other before every all-to-all, so the time between two meetings is that of the
slowest rank, which is at least the mean over ranks. The bound adds up these means, each at its least:

* *Attention and dense parts*: the mean over ranks depends on the sequences and the number of micro-steps alone. How
  evenly sequences can be packed is not part of the bound.
* *Experts*: every expert is computed as one copy, and the work is spread evenly. Splitting an expert's rows into more
  copies adds fixed time and tiles, and never takes less.
* *Dispatch and combine*: a rank holds E / R + S experts, its homes and slots, so a node holds that many for each of its
  ranks. At least the rows for all other experts leave the node of their tokens; fewest if the node holds the experts
  that its own tokens use most. The same argument bounds the rows inside nodes. An all-to-all lasts as long as the
  slower of a rank's two links in their busier direction, at least as long as with all rows spread evenly over the
  ranks' links. Where the experts' homes are does not matter: each node has the best experts for itself, in every
  instance.
* *Optimizer*: as in the simulator, where gradient sums overlap with the last backward; that of the bound is shortest.
* Planning, moves, replica transfers and imbalance take at least no time.

The bound is loose where all of this can't hold at once: one expert is at home on one rank, so not every node has its
best experts without transfers, and a plan with even loads usually sends more rows. A balancer whose copies need more
memory than the given slots can be faster than the bound, and so can a plan with another schedule: sequences with
similar routing on one node use fewer experts there.
"""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts
from trimtab.cluster.step_costs import ALL_TO_ALLS
from trimtab.planner import Schedule, Workload
from trimtab.planner.plan.step_times import dense_seconds
from trimtab.simulator.step import StepSettings
from trimtab.timeline import PARTS


def bound_step(
    schedule: Schedule,
    workload: Workload,
    lengths: Array,
    costs: OperationCosts,
    *,
    ranks_per_node: int,
    slots: int,
    settings: StepSettings,
) -> dict[str, float]:
    """Least seconds of a step by the names of `PARTS`, on one expert-parallel group. Their sum is the bound.

    Args:
        schedule: of S sequences on R ranks.
        workload: the step's load under the schedule.
        lengths: `[S]` tokens of each sequence.
        slots: most replicas of a rank in an instance.
        settings: whether micro-steps are recomputed and checkpointed; `groups` is not used.
    """
    counts_MLRE = workload.estimated_MLRE
    layers, ranks = counts_MLRE.shape[1:3]
    inside_MR, outside_MR = dense_seconds(schedule, lengths, costs)
    attention_M = layers * inside_MR.mean(axis=1) + outside_MR.mean(axis=1)
    experts_M = costs.copy_seconds(counts_MLRE.sum(axis=2, dtype=np.int64)).sum(axis=(1, 2)) / ranks
    links_ML = _least_link_seconds(counts_MLRE, costs, ranks_per_node, slots)
    dispatch_M = ALL_TO_ALLS * (layers * costs.dispatch_s + links_ML.sum(axis=1))
    forwards = 1 + settings.recompute + (settings.checkpointing is True)
    backward_M = costs.dense_backward * attention_M + costs.expert_backward * experts_M + dispatch_M
    # The last micro-step of every mini-batch.
    batches = schedule.mini_batch_of_micro_step
    closing = [int(np.flatnonzero(batches == batch)[-1]) for batch in np.unique(batches)]
    return dict.fromkeys(PARTS, 0.0) | {
        "attention": (forwards + costs.dense_backward) * float(attention_M.sum()),
        "dispatch": (forwards + 1) * float(dispatch_M.sum()),
        "experts": (forwards + costs.expert_backward) * float(experts_M.sum()),
        "optimizer": sum(costs.optimizer_s + max(0.0, costs.reduce_s - float(backward_M[m])) for m in closing),
    }


def _least_link_seconds(counts_MLRE: Array, costs: OperationCosts, ranks_per_node: int, slots: int) -> Array:
    """Seconds `[M, L]` float64 of an all-to-all without its fixed time, with the fewest rows on evenly loaded links."""
    micro_steps, layers, ranks, experts = counts_MLRE.shape
    nodes, copies = ranks // ranks_per_node, experts // ranks + slots
    counts_MLNE = counts_MLRE.reshape(micro_steps, layers, nodes, ranks_per_node, experts).sum(axis=3, dtype=np.int64)
    # At most all rows of a token share a transfer.
    near_row_s, far_row_s = costs.near_row_s / costs.top_k, costs.far_row_s / costs.top_k
    far_s = _rows_elsewhere(counts_MLNE, copies * ranks_per_node) * (far_row_s / ranks)
    if costs.forwards or nodes == 1:
        # With forwarding, rows use the link inside a node unless both ranks have the same number in their nodes.
        near_s = _rows_elsewhere(counts_MLRE, copies * nodes) * (near_row_s / ranks)
        return np.maximum(near_s, far_s)
    # Every row to another rank uses one of the links; both take the same time if the rows are divided best.
    both_s = near_row_s + far_row_s
    shared_s = near_row_s * far_row_s / both_s / ranks if both_s else 0.0
    return np.maximum(far_s, _rows_elsewhere(counts_MLRE, copies) * shared_s)


def _rows_elsewhere(counts_MLPE: Array, held: int) -> Array:
    """Rows `[M, L]` int64 of all P places for experts that a place does not hold, if each holds its `held` best."""
    others = counts_MLPE.shape[3] - held
    if others <= 0:
        return np.zeros(counts_MLPE.shape[:2], np.int64)
    return np.asarray(np.partition(counts_MLPE, others - 1, axis=3)[..., :others].sum(axis=(2, 3), dtype=np.int64))
