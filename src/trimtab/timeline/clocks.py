"""Clocks of ranks: their current time, the parts of it, and what advances them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.timeline import ATTENTION, EXPERTS, IMBALANCE, PARTS, TRANSFERS
from trimtab.timeline import recorded_operations as rec

# Layer of an operation outside layers.
NO_LAYER = np.int64(-1)


class Clocks(NamedTuple):
    """Current times of D ranks.

    Attributes:
        time_D: `[D]` float64 seconds.
        parts_DP: `[D, P]` float64, each rank's time by part (`PARTS`).
        rows_NC: `[N, C]` float64, memory for recorded operations, with the columns of `recorded_operations`. Nothing is
            recorded if N is 0.
        num_rows: `[1]` int64, recorded so far.
    """

    time_D: Array
    parts_DP: Array
    rows_NC: Array
    num_rows: Array

    @classmethod
    def at_zero(cls, num_ranks: int) -> Clocks:
        """Clocks that record nothing."""
        return cls(
            np.zeros(num_ranks), np.zeros((num_ranks, len(PARTS))), np.zeros((0, rec.COLUMNS)), np.zeros(1, np.int64)
        )


@kernel
def record(clocks, kind, lane, rank, layer, span):  # type: ignore[no-untyped-def]
    """Record an operation from `span[0]` to `span[1]` if it takes time and memory is left."""
    n = clocks.num_rows[0]
    start, end = span
    if end > start and n < len(clocks.rows_NC):
        clocks.num_rows[0] = n + 1
        row = clocks.rows_NC[n]
        row[0], row[1], row[2], row[3], row[4], row[5] = kind, lane, rank, layer, start, end


@kernel
def compute(clocks, first, seconds_R, factor, kind, layer):  # type: ignore[no-untyped-def]
    """The ranks of a group compute, from rank `first` on. What exceeds the mean is imbalance."""
    part = EXPERTS if kind == rec.EXPERTS else ATTENTION
    time_D, parts_DP, mean_s = clocks.time_D, clocks.parts_DP, factor * seconds_R.mean()
    for r in range(len(seconds_R) if len(clocks.rows_NC) > 0 else 0):
        d = first + r
        record(clocks, kind, rec.COMPUTE_LANE, d, layer, (time_D[d], time_D[d] + factor * seconds_R[r]))
    for r in range(len(seconds_R)):
        d, own_s = first + r, factor * seconds_R[r]
        time_D[d] += own_s
        parts_DP[d, part] += mean_s
        parts_DP[d, IMBALANCE] += own_s - mean_s


@kernel
def synchronise(clocks, first, last):  # type: ignore[no-untyped-def]
    """Ranks `first` to `last` wait for the latest of them and take over its parts."""
    time_D, parts_DP, latest = clocks.time_D, clocks.parts_DP, first
    for d in range(first, last):
        if time_D[d] > time_D[latest]:
            latest = d
    for d in range(first, last):
        time_D[d] = time_D[latest]
        for part in range(parts_DP.shape[1]):
            parts_DP[d, part] = parts_DP[latest, part]


@kernel
def wait(clocks, d, until, layer):  # type: ignore[no-untyped-def]
    """Rank d waits for replicas or gradients."""
    time = clocks.time_D[d]
    if until > time:
        record(clocks, rec.WAITING, rec.COMPUTE_LANE, d, layer, (time, until))
        clocks.parts_DP[d, TRANSFERS] += until - time
        clocks.time_D[d] = until
