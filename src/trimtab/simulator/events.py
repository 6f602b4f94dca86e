"""What every lane of every rank does in one round of micro-steps, written down while it is simulated."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from trimtab.trace.routing import Array

# Indices into `KINDS`.
ATTENTION, HEAD, DISPATCH, EXPERTS, COMBINE, WEIGHTS, GRADIENTS, WAITING, PLANNING = range(9)
KINDS = ("attention", "head", "dispatch", "experts", "combine", "weights", "gradients", "waiting", "planning")
# Indices into `report.content.LANES`.
COMPUTE_LANE, NODE_LANE, NETWORK_LANE, HOST_LANE, CPU_LANE = range(5)


class Events(NamedTuple):
    """Operations of the round that is shown.

    Attributes:
        shown: `[1]` bool, is this the round?
        written: `[1]` int64, operations so far.
        origin: `[1]` float64, when the round began.
        kind_N, lane_N: `[N]` uint8.
        rank_N, layer_N: `[N]` int16; layer -1 for none.
        spans_N2: `[N, 2]` float64, start and end in seconds of the step.
    """

    shown: Array
    written: Array
    origin: Array
    kind_N: Array
    lane_N: Array
    rank_N: Array
    layer_N: Array
    spans_N2: Array


def room_for(most: int) -> Events:
    """Room for so many operations; what comes after them is dropped."""
    return Events(
        np.zeros(1, bool),
        np.zeros(1, np.int64),
        np.zeros(1),
        np.zeros(most, np.uint8),
        np.zeros(most, np.uint8),
        np.zeros(most, np.int16),
        np.zeros(most, np.int16),
        np.zeros((most, 2)),
    )


@numba.njit(cache=True, nogil=True)
def note(events, kind, lane, rank, layer, start, end):  # type: ignore[no-untyped-def]
    """Write an operation down, if its round is shown and it takes any time."""
    n = events.written[0]
    if events.shown[0] and end > start and n < len(events.kind_N):
        events.written[0] = n + 1
        events.kind_N[n], events.lane_N[n], events.rank_N[n], events.layer_N[n] = kind, lane, rank, layer
        events.spans_N2[n, 0], events.spans_N2[n, 1] = start, end
