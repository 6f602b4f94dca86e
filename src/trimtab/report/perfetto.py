"""Timelines as a Chrome trace-event file, for Perfetto's viewer and chrome://tracing.

Every rank of every timeline is a process, every row of a lane one of its threads, every operation a complete event
(`ph` X). All timelines start at 0, for comparison. Perfetto drops events that overlap in a thread, and identifies a
thread only by its number. Lanes with concurrent operations therefore get several threads, and every number is unique.
(Trace Event Format; Perfetto's `json_trace_parser` and its issue 4280.)
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from trimtab.errors import InputError
from trimtab.files import write_atomically
from trimtab.report.model import Timeline
from trimtab.report.timeline_rows import row_name, rows_of
from trimtab.simulator.recorded_operations import LANES

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
