"""Work of every rank in every instance under a plan, in seconds, without waiting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts
from trimtab.kernels import kernel
from trimtab.planner import StepPlan, Workload


@dataclass(frozen=True, eq=False)
class RankWork:
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
    shape = (plan.num_micro_steps, plan.num_layers, plan.num_ranks)
    experts, moved, near, far, hop = (np.zeros(shape) for _ in range(5))
    loads = np.zeros(shape, np.int64)
    copy = (costs.tile_rows, costs.tile_s, costs.copy_s, costs.weights_s, costs.row_s)
    rows = (costs.near_row_s, costs.far_row_s, costs.hop_row_s, costs.forwards)
    _fill(
        workload.estimated_MLRE, plan.home, plan.replica_starts, plan.replica_experts, plan.replica_ranks,
        plan.quota_starts, plan.quota_sources, plan.quota_tokens, plan.ranks_per_node, hops, even, copy, rows,
        experts, moved, near, far, hop, loads,
    )  # fmt: skip
    return RankWork(experts, moved, near, far, hop, loads)


@kernel
def _copy_seconds(rows, copy):  # type: ignore[no-untyped-def]
    """Forward through one copy of an expert."""
    tile_rows, tile_s, copy_s, weights_s, row_s = copy
    if rows <= 0:
        return 0.0
    tiles = -(-rows // tile_rows)
    return copy_s + max(tiles * tile_s, weights_s) + rows * row_s


@kernel
def _fill(  # type: ignore[no-untyped-def]
    counts_MLRE, home_LE, replica_starts, replica_experts, replica_ranks, quota_starts, quota_sources, quota_tokens,
    ranks_per_node, hops, even, copy, row_costs, experts_MLR, moved_MLR, near_MLR, far_MLR, hop_MLR, loads_MLR,
):  # fmt: skip
    num_micro_steps, num_layers, num_ranks, num_experts = counts_MLRE.shape
    near_row_s, far_row_s, hop_row_s, forwards = row_costs
    # Rows sent and received: [in its own node or another, out or in, rank]; forwarded rows: [out or in, rank].
    rows = np.zeros((2, 2, num_ranks), np.int64)
    moving = np.zeros((2, num_ranks), np.int64)
    at_home = np.zeros(num_experts, np.int64)
    for m in range(num_micro_steps):
        for layer in range(num_layers):
            counts_RE, home_E = counts_MLRE[m, layer], home_LE[layer]
            if even:
                _spread_evenly(
                    counts_RE, ranks_per_node, copy, near_row_s, far_row_s, forwards,
                    experts_MLR[m, layer], near_MLR[m, layer], far_MLR[m, layer], loads_MLR[m, layer],
                )  # fmt: skip
                continue
            rows[:] = 0
            moving[:] = 0
            at_home[:] = 0
            for source in range(num_ranks):
                for e in range(num_experts):
                    tokens = counts_RE[source, e]
                    at_home[e] += tokens
                    _send(rows, source, home_E[e], ranks_per_node, forwards, tokens)
            instance = m * num_layers + layer
            for p in range(replica_starts[instance], replica_starts[instance + 1]):
                expert, rank = replica_experts[p], replica_ranks[p]
                share = np.int64(0)
                for q in range(quota_starts[p], quota_starts[p + 1]):
                    source, tokens = quota_sources[q], np.int64(quota_tokens[q])
                    share += tokens
                    if hops == 1:
                        _send(rows, source, home_E[expert], ranks_per_node, forwards, -tokens)
                        _send(rows, source, rank, ranks_per_node, forwards, tokens)
                at_home[expert] -= share
                loads_MLR[m, layer, rank] += share
                if hops == 1:
                    experts_MLR[m, layer, rank] += _copy_seconds(share, copy)
                else:
                    moved_MLR[m, layer, rank] += _copy_seconds(share, copy)
                    moving[0, home_E[expert]] += share
                    moving[1, rank] += share
            for e in range(num_experts):
                loads_MLR[m, layer, home_E[e]] += at_home[e]
                experts_MLR[m, layer, home_E[e]] += _copy_seconds(at_home[e], copy)
            for r in range(num_ranks):
                near_MLR[m, layer, r] = max(rows[0, 0, r], rows[0, 1, r]) * near_row_s
                far_MLR[m, layer, r] = max(rows[1, 0, r], rows[1, 1, r]) * far_row_s
                hop_MLR[m, layer, r] = max(moving[0, r], moving[1, r]) * hop_row_s


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


@kernel
def _spread_evenly(  # type: ignore[no-untyped-def]
    counts_RE, ranks_per_node, copy, near_row_s, far_row_s, forwards, experts_R, near_R, far_R, loads_R
):
    """Spread the experts' work and all rows evenly over ranks, with rows from all ranks."""
    num_ranks, num_experts = counts_RE.shape
    share = -(-counts_RE.sum() // num_ranks)
    near, far = (ranks_per_node - 1) / num_ranks, (num_ranks - ranks_per_node) / num_ranks
    if forwards:
        near += far * (ranks_per_node - 1) / ranks_per_node
    seconds = 0.0
    for e in range(num_experts):
        seconds += _copy_seconds(counts_RE[:, e].sum(), copy)
    for r in range(num_ranks):
        sent = max(counts_RE[r].sum(), share)
        loads_R[r] = share
        experts_R[r] = seconds / num_ranks
        near_R[r] = near * sent * near_row_s
        far_R[r] = far * sent * far_row_s
