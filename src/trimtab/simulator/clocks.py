"""Clocks of ranks: their current time, the parts of it, and what advances them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import copy_values, kernel
from trimtab.planner.plan.pass_times import ATTENTION, EXPERTS, IMBALANCE, TRANSFERS
from trimtab.simulator import recorded_operations as rec

# Layer of an operation outside layers.
NO_LAYER = np.int64(-1)


class Clocks(NamedTuple):
    """Current times of D ranks.

    Attributes:
        time_D: `[D]` float64 seconds.
        parts_DP: `[D, P]` float64, each rank's time by part (`PARTS`).
        operations_N6: `[N, 6]` float64, memory for recorded operations: kind, lane, rank, layer (-1 for none), start
            and end. Nothing is recorded if N is 0.
        num_operations: `[1]` int64, recorded so far.
    """

    time_D: Array
    parts_DP: Array
    operations_N6: Array
    num_operations: Array


@kernel
def record(clocks, kind, lane, rank, layer, span):  # type: ignore[no-untyped-def]
    """Record an operation from `span[0]` to `span[1]` if it takes time and memory is left."""
    n = clocks.num_operations[0]
    start, end = span
    if end > start and n < len(clocks.operations_N6):
        clocks.num_operations[0] = n + 1
        row = clocks.operations_N6[n]
        row[0], row[1], row[2], row[3], row[4], row[5] = kind, lane, rank, layer, start, end


@kernel
def compute(clocks, first, seconds_R, factor, kind, layer):  # type: ignore[no-untyped-def]
    """The ranks of a group compute, from rank `first` on. What exceeds the mean is imbalance."""
    part = EXPERTS if kind == rec.EXPERTS else ATTENTION
    mean_s = factor * seconds_R.mean()
    for r in range(len(seconds_R)):
        d, own_s = first + r, factor * seconds_R[r]
        record(clocks, kind, rec.COMPUTE_LANE, d, layer, (clocks.time_D[d], clocks.time_D[d] + own_s))
        clocks.time_D[d] += own_s
        clocks.parts_DP[d, part] += mean_s
        clocks.parts_DP[d, IMBALANCE] += own_s - mean_s


@kernel
def synchronise(clocks, first, last):  # type: ignore[no-untyped-def]
    """Ranks `first` to `last` wait for the latest of them and take over its parts."""
    latest = first
    for d in range(first, last):
        if clocks.time_D[d] > clocks.time_D[latest]:
            latest = d
    for d in range(first, last):
        if d != latest:
            clocks.time_D[d] = clocks.time_D[latest]
            copy_values(clocks.parts_DP[latest], clocks.parts_DP[d])


@kernel
def wait(clocks, d, until, layer):  # type: ignore[no-untyped-def]
    """Rank d waits for replicas or gradients."""
    time = clocks.time_D[d]
    if until > time:
        record(clocks, rec.WAITING, rec.COMPUTE_LANE, d, layer, (time, until))
        clocks.parts_DP[d, TRANSFERS] += until - time
        clocks.time_D[d] = until
