"""The trace-event file meets the requirements of Perfetto's importer, and contains every operation."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.reports import KINDS, some_report
from trimtab.errors import InputError
from trimtab.report.model import Timeline
from trimtab.report.timelines import write_perfetto
from trimtab.timeline.recorded_operations import LANES


def read(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    content = json.loads(data, parse_float=Decimal)
    return list(content["traceEvents"])


def names_of(events: list[dict[str, Any]], kind: str) -> dict[tuple[int, int], Any]:
    key = {"process_name": "name", "thread_name": "name"}.get(kind, "sort_index")
    return {(e["pid"], e["tid"]): e["args"][key] for e in events if e["ph"] == "M" and e["name"] == kind}


def test_all_operations_are_written_with_times_ranks_and_lanes(tmp_path: Path) -> None:
    timelines = some_report(ranks=3).timelines
    write_perfetto(timelines, tmp_path / "t.json")
    events = read(tmp_path / "t.json")
    processes = {pid: name for (pid, _), name in names_of(events, "process_name").items()}
    threads = names_of(events, "thread_name")
    found = sorted(
        (processes[e["pid"]], threads[e["pid"], e["tid"]], e["name"], e["args"].get("layer", -1), e["ts"], e["dur"])
        for e in events
        if e["ph"] == "X"
    )
    expected = []
    for timeline in timelines:
        for n in range(len(timeline.kind_N)):
            start, end = (Decimal(round(t[n] * 1e9)) / 1000 for t in (timeline.start_N, timeline.end_N))
            process, lane = f"{timeline.title}, rank {timeline.rank_N[n]}", LANES[timeline.lane_N[n]]
            expected.append((process, lane, KINDS[timeline.kind_N[n]], int(timeline.layer_N[n]), start, end - start))
    assert found == sorted(expected)


def test_operations_of_a_thread_do_not_overlap_and_numbers_are_unique(tmp_path: Path) -> None:
    # One lane with overlapping and nested operations, besides ordinary ones.
    start, end = np.array([[0.0, 1.0, 1.5, 3.0, 0.1], [2.0, 3.0, 1.6, 4.0, 0.9]]) * 1e-6
    crowded = Timeline(
        "crowded", ('"quoted" <name>',), np.zeros(5, np.uint8), np.ones(5, np.uint8), np.zeros(5, np.int16),
        np.full(5, -1, np.int16), start, end,
    )  # fmt: skip
    write_perfetto([*some_report(ranks=2).timelines, crowded], tmp_path / "t.json.gz")
    events = read(tmp_path / "t.json.gz")
    lanes = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            lanes[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for spans in lanes.values():
        assert all(later[0] >= earlier[1] for earlier, later in pairwise(spans))
    assert names_of(events, "thread_name").keys() == lanes.keys()
    numbers = [*{pid for pid, _ in lanes}, *(tid for _, tid in lanes)]
    assert len(numbers) == len(set(numbers))
    assert 0 not in numbers
    mine = [e for e in events if e["ph"] == "X" and e["name"] == '"quoted" <name>']
    assert len({e["tid"] for e in mine}) == 3
    assert len(mine) == 5


def test_ranks_and_lanes_are_sorted(tmp_path: Path) -> None:
    write_perfetto(some_report(ranks=12).timelines, tmp_path / "t.json")
    events = read(tmp_path / "t.json")
    order, names = names_of(events, "process_sort_index"), names_of(events, "process_name")
    shown = [names[key] for key in sorted(order, key=order.__getitem__)]
    assert shown == [f"{run}, micro-step 0, rank {rank}" for run in ("static", "trimtab") for rank in range(12)]
    lane_order, lane_names = names_of(events, "thread_sort_index"), names_of(events, "thread_name")
    last = max(pid for pid, _ in lane_order)
    lanes = sorted((key for key in lane_order if key[0] == last), key=lane_order.__getitem__)
    assert [lane_names[key] for key in lanes] == ["compute", "node link", "network", "host link"]


def test_one_timeline_has_no_prefix_and_none_has_no_events(tmp_path: Path) -> None:
    write_perfetto(some_report(timelines=1).timelines, tmp_path / "one.json")
    assert set(names_of(read(tmp_path / "one.json"), "process_name").values()) == {f"rank {r}" for r in range(8)}
    write_perfetto([], tmp_path / "none.json")
    assert read(tmp_path / "none.json") == []


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        write_perfetto(some_report().timelines, tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_another_suffix_raises_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"should end in \.json or \.json\.gz"):
        write_perfetto([], tmp_path / "t.perfetto")
    assert list(tmp_path.iterdir()) == []
