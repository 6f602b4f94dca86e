"""Token counts by expert, the only pass over the ids in planning; and the skew of a whole trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.trace.routing import RoutingTrace
from trimtab.trace.store import TraceReader


def count_experts(
    trace: RoutingTrace, group_of_sequence: Array, num_groups: int, dtype: npt.DTypeLike = np.int32
) -> Array:
    """Token counts `[G, L, E]` by group of sequences, layer and expert. Unknown routes are not counted.

    Args:
        group_of_sequence: `[S]` integers in `[0, G)`, the group (micro-step, rank, ...) that each sequence belongs to.
        num_groups: G.
        dtype: integer type of the counts; it must hold the tokens of a group. The kernel is compiled for each dtype of
            counts and expert ids.
    """
    counts_GLE = np.zeros((num_groups, trace.num_layers, trace.num_experts), dtype)
    _count(trace.expert_ids, trace.sequence_starts, np.asarray(group_of_sequence, np.int64), counts_GLE)
    return counts_GLE


@kernel
def _count(ids_TLK, starts, group_of_sequence, counts_GLE):  # type: ignore[no-untyped-def]
    num_layers, top_k = ids_TLK.shape[1], ids_TLK.shape[2]
    num_experts = counts_GLE.shape[2]
    for s in range(len(group_of_sequence)):
        counts_LE = counts_GLE[group_of_sequence[s]]
        for t in range(starts[s], starts[s + 1]):
            for layer in range(num_layers):
                for k in range(top_k):
                    expert = ids_TLK[t, layer, k]
                    if expert < num_experts:
                        counts_LE[layer, expert] += 1


@dataclass(frozen=True)
class LayerSkew:
    """Expert popularity by MoE layer, over all known routes of a trace.

    Attributes:
        token_counts_LE: `[L, E]` int64, tokens by layer and expert.
        hottest_over_mean_L: `[L]`, the busiest expert's tokens over the mean expert's.
        busier_half_share_L: `[L]`, the fraction of tokens that the busier half of the experts gets (0.5 is even).
    """

    token_counts_LE: Array
    hottest_over_mean_L: Array
    busier_half_share_L: Array


def layer_skew(reader: TraceReader) -> tuple[LayerSkew, int]:
    """Count a trace's experts, and return their skew.

    Returns:
        The skew, and the number of (token, layer) pairs without a recorded route.
    """
    counts_LE = np.zeros((reader.empty.num_layers, reader.empty.num_experts), np.int64)
    unknown = 0
    for chunk in reader.chunks():
        counts_LE += count_experts(chunk, np.zeros(chunk.num_sequences, np.int64), 1)[0]
        unknown += int(np.count_nonzero(chunk.expert_ids[:, :, 0] == chunk.no_route))
    num_experts = reader.empty.num_experts
    totals_L = np.maximum(counts_LE.sum(axis=1), 1)
    descending_LE = -np.sort(-counts_LE, axis=1)
    skew = LayerSkew(
        token_counts_LE=counts_LE,
        hottest_over_mean_L=descending_LE[:, 0] * num_experts / totals_L,
        busier_half_share_L=descending_LE[:, : num_experts // 2].sum(axis=1) / totals_L,
    )
    return skew, unknown
