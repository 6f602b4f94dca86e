"""Token counts by expert, the only pass over the ids in planning."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.trace.routing import RoutingTrace


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
