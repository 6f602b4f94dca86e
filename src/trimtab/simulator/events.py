"""Operations of every lane of every rank in one round of micro-steps, recorded during the simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel

# Indices into `KINDS`.
ATTENTION, HEAD, DISPATCH, EXPERTS, COMBINE, WEIGHTS, GRADIENTS, WAITING, PLANNING = range(9)
KINDS = ("attention", "head", "dispatch", "experts", "combine", "weights", "gradients", "waiting", "planning")
# Indices into `report.content.LANES`.
COMPUTE_LANE, NODE_LANE, NETWORK_LANE, HOST_LANE, CPU_LANE = range(5)


# Indices into `Clock.page`.
SHOWN, NOTED, ORIGIN = range(3)


class Clock(NamedTuple):
    """Current times of D ranks and the parts of their time; operations of one round are recorded.

    Attributes:
        time: `[D]` float64 seconds.
        parts: `[D, P]` float64, each rank's time by part.
        page: `[3]` float64, recording on or off, number of recorded operations, and start of the round.
        notes_N6: `[N, 6]` float64: kind, lane, rank, layer (-1 for none), start and end.
    """

    time: Array
    parts: Array
    page: Array
    notes_N6: Array


@dataclass(frozen=True, eq=False)
class Events:
    """Operations of one round.

    Attributes:
        kind_N, lane_N: `[N]` uint8.
        rank_N, layer_N: `[N]` int16; layer -1 for none.
        spans_N2: `[N, 2]` float64, start and end in seconds from the beginning of the round.
    """

    kind_N: Array
    lane_N: Array
    rank_N: Array
    layer_N: Array
    spans_N2: Array

    @classmethod
    def noted(cls, clock: Clock) -> Events:
        """Returns the recorded operations of a clock."""
        notes_N6 = clock.notes_N6[: int(clock.page[NOTED])]
        kind_N, lane_N = notes_N6[:, :2].T.astype(np.uint8)
        rank_N, layer_N = notes_N6[:, 2:4].T.astype(np.int16)
        return cls(kind_N, lane_N, rank_N, layer_N, notes_N6[:, 4:] - clock.page[ORIGIN])


@kernel
def note(clock, kind, lane, rank, layer, start, end):  # type: ignore[no-untyped-def]
    """Record an operation if its round is shown, its time is not 0, and memory is left."""
    n = int(clock.page[NOTED])
    if clock.page[SHOWN] > 0.0 and end > start and n < len(clock.notes_N6):
        clock.page[NOTED] += 1.0
        row = clock.notes_N6[n]
        row[0], row[1], row[2], row[3], row[4], row[5] = kind, lane, rank, layer, start, end
