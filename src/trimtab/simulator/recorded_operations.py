"""Recorded operations of every rank in one round of micro-steps: kinds and lanes, for timelines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array

KINDS = ("attention", "head", "dispatch", "experts", "combine", "weights", "gradients", "waiting", "planning")
LANES = ("compute", "node link", "network", "host link", "CPU")
# Indices into `KINDS` and `LANES`; int64, because numba compiles a function once more for every Python int.
ATTENTION, HEAD, DISPATCH, EXPERTS, COMBINE, WEIGHTS, GRADIENTS, WAITING, PLANNING = np.arange(len(KINDS))
COMPUTE_LANE, NODE_LANE, NETWORK_LANE, HOST_LANE, CPU_LANE = np.arange(len(LANES))


@dataclass(frozen=True, eq=False)
class Operations:
    """Operations of one round.

    Attributes:
        kind_N, lane_N: `[N]` uint8, indices into `KINDS` and `LANES`.
        rank_N, layer_N: `[N]` int16; layer -1 for none.
        spans_N2: `[N, 2]` float64, start and end in seconds from the beginning of the round.
    """

    kind_N: Array
    lane_N: Array
    rank_N: Array
    layer_N: Array
    spans_N2: Array

    @classmethod
    def from_rows(cls, rows_N6: Array, origin_s: float) -> Operations:
        """Returns the operations of `Clocks.operations_N6`; `origin_s` is the beginning of the round."""
        kind_N, lane_N = rows_N6[:, :2].T.astype(np.uint8)
        rank_N, layer_N = rows_N6[:, 2:4].T.astype(np.int16)
        return cls(kind_N, lane_N, rank_N, layer_N, rows_N6[:, 4:] - origin_s)
