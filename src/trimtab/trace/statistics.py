"""Skew of a whole trace, independent of a cluster."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.trace.counting import count_experts
from trimtab.trace.store import TraceReader


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
