"""Work of every rank in every instance under a plan, in seconds, without waiting."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts
from trimtab.kernels import kernel
from trimtab.planner.replicas.replica_table import ReplicaTable


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
    replicas: ReplicaTable,
    home_LE: Array,
    counts_MLRE: Array,
    ranks_per_node: int,
    costs: OperationCosts,
    *,
    hops: int = 1,
) -> RankWork:
    """The work of every rank in M micro-steps and L layers.

    Args:
        replicas: of M * L instances, those of a micro-step next to each other.
        home_LE: `[L, E]` int16.
        counts_MLRE: `[M, L, R, E]` int32 rows by source rank and expert (`Workload.estimated_MLRE`).
        hops: 2 if moved tokens are first sent to the home rank.
    """
    shape = counts_MLRE.shape[:3]
    experts, moved, near, far, hop = (np.zeros(shape) for _ in range(5))
    work = RankWork(experts, moved, near, far, hop, np.zeros(shape, np.int64))
    _fill(counts_MLRE, home_LE, replicas, (ranks_per_node, hops), costs, work)
    return work


@kernel
def _fill(counts_MLRE, home_LE, replicas, limits, costs, work):  # type: ignore[no-untyped-def]
    """Adds the work of all instances to `work`, which is 0; `limits` are ranks per node and hops."""
    num_micro_steps, num_layers, num_ranks, num_experts = counts_MLRE.shape
    per_node, hops = limits
    # Rows that each rank sends to each; forwarded rows: [out or in, rank].
    sent_RR = np.empty((num_ranks, num_ranks), np.int64)
    moving = np.zeros((2, num_ranks), np.int64)
    at_home = np.zeros(num_experts, np.int64)
    for m in range(num_micro_steps):
        for layer in range(num_layers):
            home_E = home_LE[layer]
            sent_RR[:] = 0
            moving[:] = 0
            at_home[:] = 0
            for r in range(num_ranks):
                counts_E, sent_R = counts_MLRE[m, layer, r], sent_RR[r]
                for e in range(num_experts):
                    at_home[e] += counts_E[e]
                    sent_R[home_E[e]] += counts_E[e]
            instance = m * num_layers + layer
            for p in range(replicas.replica_starts[instance], replicas.replica_starts[instance + 1]):
                expert, rank = replicas.experts[p], replicas.ranks[p]
                share = np.int64(0)
                for q in range(replicas.quota_starts[p], replicas.quota_starts[p + 1]):
                    tokens = np.int64(replicas.tokens[q])
                    share += tokens
                    if hops == 1:
                        sent_RR[replicas.sources[q], home_E[expert]] -= tokens
                        sent_RR[replicas.sources[q], rank] += tokens
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
            rows_22R = _count_sent(sent_RR, np.int64(per_node), costs.forwards)
            for r in range(num_ranks):
                work.near_MLR[m, layer, r] = max(rows_22R[0, 0, r], rows_22R[0, 1, r]) * costs.near_row_s
                work.far_MLR[m, layer, r] = max(rows_22R[1, 0, r], rows_22R[1, 1, r]) * costs.far_row_s
                work.hop_MLR[m, layer, r] = max(moving[0, r], moving[1, r]) * costs.hop_row_s


@kernel
def _count_sent(sent_RR, per_node, forwards):  # type: ignore[no-untyped-def]
    """Rows `[2, 2, R]` int64 over the links of every rank: inside its node or between nodes, out or in.

    With forwarding, rows for another node go to the rank there with the source's local number, and from it to others.
    """
    num_ranks = len(sent_RR)
    rows = np.zeros((2, 2, num_ranks), np.int64)
    near_out, near_in, far_out, far_in = rows[0, 0], rows[0, 1], rows[1, 0], rows[1, 1]
    for source in range(num_ranks):
        sent_R, local = sent_RR[source], source % per_node
        for first in range(0, num_ranks, per_node):
            relay = first + local
            total = np.int64(0)
            for to in range(first, first + per_node):
                total += sent_R[to]
            if relay != source:
                far_out[source] += total
                if not forwards:
                    for to in range(first, first + per_node):
                        far_in[to] += sent_R[to]
                    continue
                far_in[relay] += total
            near_out[relay] += total - sent_R[relay]
            for to in range(first, first + per_node):
                near_in[to] += sent_R[to]
            near_in[relay] -= sent_R[relay]
    return rows


@kernel
def _copy_seconds(rows, costs):  # type: ignore[no-untyped-def]
    """Forward through one copy of an expert."""
    if rows <= 0:
        return 0.0
    tiles = -(-rows // costs.tile_rows)
    return costs.copy_s + max(tiles * costs.tile_s, costs.weights_s) + rows * costs.row_s


def even_work(counts_MLRE: Array, ranks_per_node: int, costs: OperationCosts) -> RankWork:
    """The experts' work and all rows spread evenly over ranks, with rows from all ranks: the ideal run."""
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
