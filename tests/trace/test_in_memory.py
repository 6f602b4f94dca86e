"""A trace in memory gives the same results as its file."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from helpers.traces import odd_trace
from trimtab import InputError, RoutingTrace, TraceReader, write_trace
from trimtab.trace.store import MemoryReader, open_trace


def same(one: RoutingTrace, other: RoutingTrace) -> bool:
    return all(np.array_equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(RoutingTrace))


def test_a_trace_in_memory_reads_like_its_file(tmp_path: Path) -> None:
    trace = odd_trace(3)
    write_trace(trace, tmp_path / "t.parquet")
    file, memory = TraceReader(tmp_path / "t.parquet"), open_trace(trace)
    assert isinstance(memory, MemoryReader)
    assert same(file.empty, memory.empty)
    for step in (None, 0, 1):
        assert same(file.read(step), memory.read(step))
    assert same(RoutingTrace.concatenate(list(file.chunks())), RoutingTrace.concatenate(list(memory.chunks())))
    for field in fields(file.facts):
        assert np.array_equal(getattr(file.facts, field.name), getattr(memory.facts, field.name))
    assert not memory.files
    with pytest.raises(InputError, match="trace in memory: no step 7; it has steps 0 to 1"):
        memory.read(7)
    # Sorted ids are not copied.
    from_file = file.read()
    assert MemoryReader(from_file).read() is from_file
