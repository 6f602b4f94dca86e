"""Recorded operations of every rank in one round of micro-steps: kinds and lanes, for timelines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts

KINDS = ("attention", "head", "dispatch", "experts", "combine", "weights", "gradients", "waiting", "planning")
LANES = ("compute", "node link", "network", "host link", "CPU")
# Indices into `KINDS` and `LANES`; int64, because numba compiles a function once more for every Python int.
ATTENTION, HEAD, DISPATCH, EXPERTS, COMBINE, WEIGHTS, GRADIENTS, WAITING, PLANNING = np.arange(len(KINDS))
COMPUTE_LANE, NODE_LANE, NETWORK_LANE, HOST_LANE, CPU_LANE = np.arange(len(LANES))


# Of a recorded row: kind, lane, rank, layer (-1 for none), start and end. Of a transfer, see `from_rows`, also when the
# link was free; and the other rank, -1 for none, and its end.
KIND, LANE, RANK, LAYER, START, END, FREE, OTHER, OTHER_END = range(9)
COLUMNS = 9
ROUNDING = 1e-12


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
    def from_rows(cls, rows_NC: Array, origin_s: float, lost_3D: Array, costs: OperationCosts) -> Operations:
        """The operations of a round from the rows of `Clocks`.

        Times of transfers but their earliest start are of the clocks of links, see `Transfers`; the all-to-alls among
        the rows say which times these are.

        Args:
            origin_s: the beginning of the round.
            lost_3D: `[3, D]` seconds that all-to-alls had taken from the links of each rank by then.
        """
        kind_N, lane_N = rows_NC[:, [KIND, LANE]].T.astype(np.uint8)
        rank_N, layer_N = rows_NC[:, [RANK, LAYER]].T.astype(np.int16)
        spans_N2 = rows_NC[:, [START, END]].copy()
        is_transfer_N = (kind_N == WEIGHTS) | (kind_N == GRADIENTS)
        for lane, spare in ((NODE_LANE, costs.near_spare), (NETWORK_LANE, costs.far_spare), (HOST_LANE, 1.0)):
            on_lane_N = lane_N == lane
            moved_N, calls_N = on_lane_N & is_transfer_N, on_lane_N & ~is_transfer_N
            for rank in np.unique(rows_NC[moved_N][:, [RANK, OTHER]]).astype(int).tolist():
                calls_C2 = spans_N2[calls_N & (rank_N == rank)]

                def times(clock_N: Array, calls_C2: Array = calls_C2, lost_s: float = lost_3D[lane - 1, rank]) -> Array:
                    return _times(clock_N, calls_C2, lost_s, spare)  # noqa: B023

                own_N, others_N = moved_N & (rank_N == rank), moved_N & (rows_NC[:, OTHER] == rank)
                spans_N2[own_N, 0] = np.maximum(spans_N2[own_N, 0], times(rows_NC[own_N, FREE]))
                spans_N2[own_N, 1] = times(rows_NC[own_N, END])
                rows_NC[others_N, OTHER_END] = times(rows_NC[others_N, OTHER_END])
        has_other_N = is_transfer_N & (rows_NC[:, OTHER] >= 0)
        spans_N2[has_other_N, 1] = np.maximum(spans_N2[has_other_N, 1], rows_NC[has_other_N, OTHER_END])
        return cls(kind_N, lane_N, rank_N, layer_N, spans_N2 - origin_s)


def _times(clock_N: Array, calls_C2: Array, lost_s: float, spare: float) -> Array:
    """The first times at which a link's clock showed these values.

    Args:
        calls_C2: `[C, 2]` starts and ends of all-to-alls, ascending.
        lost_s: seconds that earlier ones had taken.
        spare: the part of the link that an all-to-all leaves.
    """
    time_B = calls_C2.reshape(-1)
    lost_B = lost_s + np.stack([np.zeros(len(calls_C2)), (1 - spare) * np.diff(calls_C2)[:, 0]], axis=1).cumsum()
    if not len(time_B):
        return np.asarray(clock_N + lost_s)
    # From right to left, so that the first of values that are equal but for rounding is found.
    clock_N = clock_N * (1 - ROUNDING)
    between_N = -np.interp(-clock_N, -(time_B - lost_B)[::-1], -time_B[::-1])
    after_N = np.maximum(0.0, clock_N - (time_B - lost_B)[-1])
    before_N = np.minimum(0.0, clock_N - (time_B - lost_B)[0])
    return np.asarray(between_N + before_N + after_N)
