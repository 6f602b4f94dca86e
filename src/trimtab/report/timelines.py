"""Timelines as rows without overlaps, for the page, and as a Chrome trace-event file, for Perfetto's viewer."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.files import write_atomically
from trimtab.report.model import Timeline
from trimtab.timeline.recorded_operations import LANES


@dataclass(frozen=True, eq=False)
class TimelineRows:
    """Operations of a timeline, ordered by rank, lane, row and start.

    Attributes:
        order_N: `[N]` int64, the operations' indices in the timeline.
        start_N, end_N: `[N]` int64 ticks from the beginning, in this order. Operations in a row do not overlap.
        starts_W1: `[W + 1]` int64, start of each row, and the end of the last.
        rank_W, lane_W: `[W]` int64, rank and lane of each row.
        row_W: `[W]` int64, 0 for a lane's first row.
    """

    order_N: Array
    start_N: Array
    end_N: Array
    starts_W1: Array
    rank_W: Array
    lane_W: Array
    row_W: Array


def row_name(lane: int, row: int) -> str:
    """Name of a row, unique within a rank: the lane's name, with a number from the second row on."""
    return LANES[lane] if row == 0 else f"{LANES[lane]} ({row + 1})"


def rows_of(timeline: Timeline, tick_s: float) -> TimelineRows:
    """Arrange a timeline in rows, in integer ticks of `tick_s` seconds.

    Starts and ends are rounded in the same way, so adjacent operations stay adjacent.
    """
    start_N = np.rint(timeline.start_N / tick_s).astype(np.int64)
    end_N = np.maximum(start_N, np.rint(timeline.end_N / tick_s).astype(np.int64))
    lane_N, rank_N = timeline.lane_N.astype(np.int64), timeline.rank_N.astype(np.int64)
    row_N = np.zeros(len(start_N), np.int64)
    order = np.lexsort((end_N, start_N, lane_N, rank_N))
    same_lane = (np.diff(lane_N[order]) == 0) & (np.diff(rank_N[order]) == 0)
    overlaps = same_lane & (start_N[order][1:] < end_N[order][:-1])
    edges = [0, *(np.flatnonzero(~same_lane) + 1).tolist(), len(order)]
    for first, last in pairwise(edges):
        if overlaps[first : last - 1].any():
            row_N[order[first:last]] = _first_free_row(start_N[order[first:last]], end_N[order[first:last]])
    order = np.lexsort((end_N, start_N, row_N, lane_N, rank_N))
    keys_N3 = np.stack([rank_N, lane_N, row_N], axis=1)[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (np.diff(keys_N3, axis=0) != 0).any(axis=1)
    first_W = np.flatnonzero(begins)
    rank_W, lane_W, row_W = keys_N3[first_W].T
    starts_W1 = np.append(first_W, len(order))
    return TimelineRows(order, start_N[order], end_N[order], starts_W1, rank_W, lane_W, row_W)


def _first_free_row(start_N: Array, end_N: Array) -> Array:
    """Rows `[N]` of one lane's operations, ordered by start: the first whose last operation has ended."""
    ends: list[int] = []
    rows = np.zeros(len(start_N), np.int64)
    for n, (start, end) in enumerate(zip(start_N.tolist(), end_N.tolist(), strict=True)):
        row = next((row for row, last in enumerate(ends) if last <= start), len(ends))
        if row == len(ends):
            ends.append(end)
        ends[row] = end
        rows[n] = row
    return rows


NANOSECOND = 1e-9


def write_perfetto(timelines: Sequence[Timeline], path: str | os.PathLike[str]) -> None:
    """Write timelines to a `.json` or `.json.gz` file, atomically.

    Raises:
        InputError: if the file has another suffix.
    """
    path = Path(path)
    check_name(path)
    events = ",\n".join(_events(timelines))
    content = f'{{"displayTimeUnit":"ns","traceEvents":[\n{events}\n]}}\n'.encode()
    # Without a timestamp, so two runs give the same bytes.
    write_atomically(path, gzip.compress(content, 6, mtime=0) if path.suffix == ".gz" else content)


def check_name(path: Path) -> None:
    """Raise InputError if the file has neither suffix."""
    if not path.name.endswith((".json", ".json.gz")):
        raise InputError(f"{path}: a trace for Perfetto should end in .json or .json.gz")


def _events(timelines: Sequence[Timeline]) -> Iterator[str]:
    numbers = count(1)
    place = count()
    for timeline in timelines:
        prefix = f"{timeline.title}, " if len(timelines) > 1 else ""
        rows = rows_of(timeline, NANOSECOND)
        # Nanoseconds as microseconds with three digits, exactly.
        starts = [f"{ns // 1000}.{ns % 1000:03d}" for ns in rows.start_N.tolist()]
        durations = [f"{ns // 1000}.{ns % 1000:03d}" for ns in (rows.end_N - rows.start_N).tolist()]
        kinds, layers = timeline.kind_N[rows.order_N].tolist(), timeline.layer_N[rows.order_N].tolist()
        names = [json.dumps(name) for name in timeline.names]
        process = last_rank = -1
        for w, (rank, lane, row) in enumerate(zip(*map(list, (rows.rank_W, rows.lane_W, rows.row_W)), strict=True)):
            thread = next(numbers)
            if rank != last_rank:
                process, last_rank = next(numbers), rank
                yield _named("process_name", process, thread, name=f"{prefix}rank {rank}")
                yield _named("process_labels", process, thread, labels=timeline.title)
                yield _named("process_sort_index", process, thread, sort_index=next(place))
            yield _named("thread_name", process, thread, name=row_name(lane, row))
            yield _named("thread_sort_index", process, thread, sort_index=int(lane) * 100 + int(row))
            for n in range(rows.starts_W1[w], rows.starts_W1[w + 1]):
                args = f'{{"layer":{layers[n]}}}' if layers[n] >= 0 else "{}"
                yield (
                    f'{{"ph":"X","name":{names[kinds[n]]},"cat":"{LANES[lane]}","pid":{process},"tid":{thread},'
                    f'"ts":{starts[n]},"dur":{durations[n]},"args":{args}}}'
                )


def _named(kind: str, process: int, thread: int, **args: str | int) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}, separators=(",", ":"))
