"""Work of every rank in every instance under a plan, in seconds, without waiting."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts
from trimtab.kernels import kernel
from trimtab.planner import StepPlan, Workload


class RankWork(NamedTuple):
    """Seconds of every rank in the forward of every instance, for each operation separately.

    Attributes:
        experts_MLR: `[M, L, R]` float64, the copies of experts on this rank; with two hops those that don't move.
        moved_MLR: `[M, L, R]` float64, with two hops the experts that moved here; else 0.
        near_MLR, far_MLR: `[M, L, R]` float64, rows through the rank's all-to-all inside its node and between nodes,
            the larger of sent and received rows. Dispatch and combine take this time each.
        hop_MLR: `[M, L, R]` float64, with two hops the rows that move on inside the node; else 0.
        loads_MLR: `[M, L, R]` int64 rows that the rank computes.
    """

    experts_MLR: Array
    moved_MLR: Array
    near_MLR: Array
    far_MLR: Array
    hop_MLR: Array
    loads_MLR: Array


def rank_work(
    plan: StepPlan, workload: Workload, costs: OperationCosts, *, hops: int = 1, even: bool = False
) -> RankWork:
    """The work of every rank under a plan; rows of unknown route are estimated (`Workload.estimated_MLRE`).

    Args:
        hops: 2 if moved tokens are first sent to the home rank.
        even: treat rows and the experts' work as spread evenly over ranks, independent of the plan: the ideal run.
    """
    if even:
        return _even_work(workload.estimated_MLRE, plan.ranks_per_node, costs)
    shape = (plan.num_micro_steps, plan.num_layers, plan.num_ranks)
    experts, moved, near, far, hop = (np.zeros(shape) for _ in range(5))
    work = RankWork(experts, moved, near, far, hop, np.zeros(shape, np.int64))
    placed = _Placed(**{name: getattr(plan, name) for name in _Placed._fields})
    _fill(workload.estimated_MLRE, placed, costs, hops, work)
    return work


class _Placed(NamedTuple):
    """Fields of `StepPlan`."""

    home: Array
    replica_starts: Array
    replica_experts: Array
    replica_ranks: Array
    quota_starts: Array
    quota_sources: Array
    quota_tokens: Array
    ranks_per_node: int


@kernel
def _fill(counts_MLRE, placed, costs, hops, work):  # type: ignore[no-untyped-def]
    """Adds the work of all instances to `work`, which is 0."""
    num_micro_steps, num_layers, num_ranks, num_experts = counts_MLRE.shape
    per_node, forwards = placed.ranks_per_node, costs.forwards
    # Rows sent and received: [in its own node or another, out or in, rank]; forwarded rows: [out or in, rank].
    rows = np.zeros((2, 2, num_ranks), np.int64)
    moving = np.zeros((2, num_ranks), np.int64)
    at_home = np.zeros(num_experts, np.int64)
    for m in range(num_micro_steps):
        for layer in range(num_layers):
            counts_RE, home_E = counts_MLRE[m, layer], placed.home[layer]
            rows[:] = 0
            moving[:] = 0
            at_home[:] = 0
            for r in range(num_ranks):
                for e in range(num_experts):
                    tokens = np.int64(counts_RE[r, e])
                    at_home[e] += tokens
                    _send(rows, np.int64(r), home_E[e], per_node, forwards, tokens)
            instance = m * num_layers + layer
            for p in range(placed.replica_starts[instance], placed.replica_starts[instance + 1]):
                expert, rank = placed.replica_experts[p], placed.replica_ranks[p]
                share = np.int64(0)
                for q in range(placed.quota_starts[p], placed.quota_starts[p + 1]):
                    source, tokens = np.int64(placed.quota_sources[q]), np.int64(placed.quota_tokens[q])
                    share += tokens
                    if hops == 1:
                        _send(rows, source, home_E[expert], per_node, forwards, -tokens)
                        _send(rows, source, rank, per_node, forwards, tokens)
                at_home[expert] -= share
                work.loads_MLR[m, layer, rank] += share
                if hops == 1:
                    work.experts_MLR[m, layer, rank] += _copy_seconds(share, costs)
                else:
                    work.moved_MLR[m, layer, rank] += _copy_seconds(share, costs)
                    moving[0, home_E[expert]] += share
                    moving[1, rank] += share
            for e in range(num_experts):
                work.loads_MLR[m, layer, home_E[e]] += at_home[e]
                work.experts_MLR[m, layer, home_E[e]] += _copy_seconds(at_home[e], costs)
            for r in range(num_ranks):
                work.near_MLR[m, layer, r] = max(rows[0, 0, r], rows[0, 1, r]) * costs.near_row_s
                work.far_MLR[m, layer, r] = max(rows[1, 0, r], rows[1, 1, r]) * costs.far_row_s
                work.hop_MLR[m, layer, r] = max(moving[0, r], moving[1, r]) * costs.hop_row_s


@kernel
def _copy_seconds(rows, costs):  # type: ignore[no-untyped-def]
    """Forward through one copy of an expert."""
    if rows <= 0:
        return 0.0
    tiles = -(-rows // costs.tile_rows)
    return costs.copy_s + max(tiles * costs.tile_s, costs.weights_s) + rows * costs.row_s


@kernel
def _send(rows, source, to, ranks_per_node, forwards, tokens):  # type: ignore[no-untyped-def]
    """Count rows sent to another rank: directly, or via the rank with the source's local index in that node."""
    if to == source:
        return
    if to // ranks_per_node != source // ranks_per_node:
        rows[1, 0, source] += tokens
        if not forwards:
            rows[1, 1, to] += tokens
            return
        source = to // ranks_per_node * ranks_per_node + source % ranks_per_node
        rows[1, 1, source] += tokens
        if to == source:
            return
    rows[0, 0, source] += tokens
    rows[0, 1, to] += tokens


def _even_work(counts_MLRE: Array, ranks_per_node: int, costs: OperationCosts) -> RankWork:
    """The experts' work and all rows spread evenly over ranks, with rows from all ranks."""
    num_ranks = counts_MLRE.shape[2]
    near, far = (ranks_per_node - 1) / num_ranks, (num_ranks - ranks_per_node) / num_ranks
    if costs.forwards:
        near += far * (ranks_per_node - 1) / ranks_per_node
    rows_MLE = counts_MLRE.sum(axis=2, dtype=np.int64)
    # Added up one after another, as the kernel does.
    seconds_ML1 = np.cumsum(costs.copy_seconds(rows_MLE), axis=2)[:, :, -1:]
    rows_MLR = counts_MLRE.sum(axis=3, dtype=np.int64)
    share_ML1 = -(-rows_MLE.sum(axis=2, keepdims=True) // num_ranks)
    sent_MLR = np.maximum(rows_MLR, share_ML1)
    nothing_MLR = np.zeros(sent_MLR.shape)
    return RankWork(
        experts_MLR=nothing_MLR + seconds_ML1 / num_ranks,
        moved_MLR=nothing_MLR,
        near_MLR=near * sent_MLR * costs.near_row_s,
        far_MLR=far * sent_MLR * costs.far_row_s,
        hop_MLR=nothing_MLR,
        loads_MLR=np.broadcast_to(share_ML1, sent_MLR.shape).copy(),
    )
