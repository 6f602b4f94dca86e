"""Appending to a trace on disk: complete files at any time, also after a crash; several files are one trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab import InputError, RoutingTrace, TraceReader, TraceWriter, read_trace, write_trace
from trimtab.trace import store
from trimtab.trace.store import prefetch


def some_sequences(seed: int, count: int = 3, num_experts: int = 8) -> RoutingTrace:
    rng = np.random.default_rng(seed)
    ids = [np.sort(np.argsort(rng.random((n, 3, num_experts)))[:, :, :2]) for n in rng.integers(1, 30, count)]
    return RoutingTrace.from_sequences(ids, num_experts=num_experts, steps=seed, domains=f"domain {seed % 2}")


def assert_same(one: RoutingTrace, other: RoutingTrace) -> None:
    for name in ("expert_ids", "sequence_starts", "steps", "domains"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


def append(folder: Path, *parts: RoutingTrace, **options: Any) -> None:
    with TraceWriter(folder, **options) as growing:
        for part in parts:
            growing.append(part)


def test_appended_sequences_come_back_in_order(tmp_path: Path) -> None:
    parts = [some_sequences(seed) for seed in range(12)]
    with TraceWriter(tmp_path, file_bytes=400) as growing:
        for part in parts[:7]:
            growing.append(part)
        before = len(list(tmp_path.iterdir()))
        assert 1 < before < 7
        assert read_trace(tmp_path).num_tokens >= sum(part.num_tokens for part in parts[:7]) - 400 // 6
    append(tmp_path, *parts[7:], file_bytes=400)
    assert_same(read_trace(tmp_path), RoutingTrace.concatenate(parts))


def test_writers_with_names_share_a_folder(tmp_path: Path) -> None:
    parts = [some_sequences(seed) for seed in range(4)]
    with TraceWriter(tmp_path, name="rank-0") as one, TraceWriter(tmp_path, name="rank-10") as other:
        one.append(parts[0])
        other.append(parts[1])
        one.append(parts[2])
    assert_same(read_trace(tmp_path / "rank-0-*"), RoutingTrace.concatenate([parts[0], parts[2]]))
    assert read_trace(tmp_path).num_sequences == 9


def test_a_writer_continues_its_own_files_only(tmp_path: Path) -> None:
    """ "rank" and "rank-3" are two names, though one begins like the other."""
    parts = [some_sequences(seed) for seed in range(5)]
    for seed, name in enumerate(("rank", "rank", "rank-3", "rank")):
        append(tmp_path, parts[seed], name=name)
    assert_same(read_trace(tmp_path / "rank-00*"), RoutingTrace.concatenate([parts[0], parts[1], parts[3]]))
    assert_same(read_trace(tmp_path / "rank-3-*"), parts[2])
    (tmp_path / "rank-000000.parquet").unlink()
    append(tmp_path, parts[4], name="rank")
    assert_same(read_trace(tmp_path / "rank-00*"), RoutingTrace.concatenate([parts[1], parts[3], parts[4]]))
    append(tmp_path, parts[4], name="ran")
    assert_same(read_trace(tmp_path / "ran-000000.parquet"), parts[4])


def test_a_file_is_written_when_it_is_full_only(tmp_path: Path) -> None:
    part = some_sequences(0)
    with TraceWriter(tmp_path, file_bytes=2 * part.expert_ids.nbytes) as growing:
        growing.append(part.part(0, 0))
        growing.flush()
        growing.append(part)
        assert not list(tmp_path.iterdir())
        growing.append(part)
        assert [file.name for file in tmp_path.iterdir()] == ["part-000000.parquet"]
    assert len(list(tmp_path.iterdir())) == 1


def test_sequences_of_another_model_are_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path) as growing:
        growing.append(some_sequences(0))
        with pytest.raises(InputError, match="different models"):
            growing.append(some_sequences(0, num_experts=9))
    with pytest.raises(InputError, match="different models"):
        append(tmp_path, some_sequences(0, num_experts=9))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a file; a trace that grows is a folder"):
        TraceWriter(tmp_path / "file")


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from test_writer import some_sequences
from trimtab.trace import TraceWriter
with TraceWriter({folder!r}, file_bytes=400) as growing:
    for seed in range(1_000_000):
        growing.append(some_sequences(seed))
"""


def test_files_of_a_killed_writer_are_readable(tmp_path: Path) -> None:
    program = PROGRAM.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*.parquet"))) < 20:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        process.kill()
    trace = read_trace(tmp_path)
    seeds = np.unique(trace.steps)
    assert seeds.tolist() == list(range(len(seeds)))
    assert_same(trace, RoutingTrace.concatenate([some_sequences(int(seed)) for seed in seeds]))


def test_several_files_and_patterns_are_one_trace(tmp_path: Path) -> None:
    parts = [some_sequences(seed) for seed in range(3)]
    for seed, part in enumerate(parts):
        write_trace(part, tmp_path / f"step-{seed}.parquet")
    whole = RoutingTrace.concatenate(parts)
    files = [tmp_path / f"step-{seed}.parquet" for seed in range(3)]
    for source in (tmp_path, str(tmp_path / "step-*.parquet"), files):
        assert_same(read_trace(source), whole)
    assert_same(read_trace([files[1], tmp_path]), RoutingTrace.concatenate([parts[1], parts[0], parts[2]]))
    assert_same(read_trace(tmp_path, step=1), parts[1])
    with pytest.raises(InputError, match="no step 3; it has steps 0 to 2"):
        read_trace(tmp_path, step=3)
    write_trace(some_sequences(0, num_experts=9), tmp_path / "step-9.parquet")
    with pytest.raises(InputError, match=r"step-9\.parquet: traces of different models"):
        read_trace(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        read_trace(tmp_path / "none-*")


def test_a_reader_holds_one_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ROW_GROUP_BYTES", 400)
    trace = RoutingTrace.concatenate([some_sequences(seed) for seed in range(9)])
    write_trace(trace, tmp_path / "trace.parquet")
    reader = TraceReader(tmp_path / "trace.parquet")
    chunks = list(reader.chunks())
    assert len(chunks) > 3
    assert all(chunk.expert_ids.nbytes <= 400 or chunk.num_sequences == 1 for chunk in chunks)
    assert_same(RoutingTrace.concatenate(chunks), trace)
    assert np.array_equal(reader.facts.lengths, trace.sequence_lengths)


def test_row_groups_hold_as_many_sequences_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ROW_GROUP_BYTES", 4)
    sequences = [np.zeros((length, 1, 1), int) for length in (2, 2, 0, 3, 2, 9, 0, 1)]
    write_trace(RoutingTrace.from_sequences(sequences, num_experts=2), tmp_path / "trace.parquet")
    lengths = [chunk.sequence_lengths.tolist() for chunk in TraceReader(tmp_path / "trace.parquet").chunks()]
    assert lengths == [[2, 2, 0], [3], [2], [9], [0, 1]]


def test_parts_are_written_one_at_a_time(tmp_path: Path) -> None:
    parts = [some_sequences(seed) for seed in range(3)]
    write_trace(iter(parts), tmp_path / "trace.parquet")
    assert_same(read_trace(tmp_path / "trace.parquet"), RoutingTrace.concatenate(parts))

    def failing() -> object:
        yield parts[0]
        raise InputError("the second part is bad")

    with pytest.raises(InputError, match="second part"):
        write_trace(failing(), tmp_path / "other.parquet")  # type: ignore[arg-type]
    assert [file.name for file in tmp_path.iterdir()] == ["trace.parquet"]
    with pytest.raises(InputError, match="no sequences"):
        write_trace(iter([]), tmp_path / "other.parquet")
    with pytest.raises(InputError, match="different models"):
        write_trace(iter([parts[0], some_sequences(1, num_experts=9)]), tmp_path / "other.parquet")


def test_the_next_part_is_computed_while_the_last_is_used() -> None:
    made = threading.Event()

    def parts() -> Iterator[int]:
        yield 0
        made.set()
        yield 1

    coming = prefetch(parts())
    assert next(coming) == 0
    assert made.wait(60)
    assert list(coming) == [1]


def test_one_step_of_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of several sequences, of which a step has some, all or none."""
    monkeypatch.setattr(store, "ROW_GROUP_BYTES", 400)
    whole = RoutingTrace.concatenate([some_sequences(seed) for seed in range(9)])
    whole = replace(whole, steps=np.random.default_rng(0).integers(0, 4, whole.num_sequences).astype(np.int32))
    write_trace(whole, tmp_path / "trace.parquet")
    for step in range(4):
        assert_same(read_trace(tmp_path, step=step), whole.select(np.flatnonzero(whole.steps == step)))
