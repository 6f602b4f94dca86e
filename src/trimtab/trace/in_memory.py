"""A trace in memory behind the interface of `TraceReader`, for functions that take a trace or its files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from trimtab.errors import InputError
from trimtab.trace.routing import RoutingTrace
from trimtab.trace.store import ChunkPlace, Source, TraceReader


class MemoryReader(TraceReader):
    """A trace that is already in memory: one chunk, no files.

    Results are those of a file with the same trace: every id is checked, and ids within top_k are in ascending order.

    Args:
        read_from: the files that it was read from, whose reader checked it.

    Raises:
        InputError: if an id is out of range, or twice in a row of top_k.
    """

    def __init__(self, trace: RoutingTrace, read_from: TraceReader | None = None) -> None:
        ids_TLK = trace.expert_ids
        if read_from is None:
            trace.check()
            if (ids_TLK[..., 1:] < ids_TLK[..., :-1]).any():
                trace = replace(trace, expert_ids=np.sort(ids_TLK, axis=-1))
        self._trace = trace
        self.files = read_from.files if read_from else []
        self.name = read_from.name if read_from else "trace in memory"
        self.empty = trace.part(0, 0)
        self.facts = trace.facts

    def chunks(self) -> Iterator[RoutingTrace]:
        """The whole trace."""
        yield self._trace

    def chunk_places(self) -> list[ChunkPlace]:
        """None: it is in no file."""
        return []

    def read(self, step: int | None = None) -> RoutingTrace:
        """The whole trace, without a copy, or one step of it."""
        return self._trace if step is None else super().read(step)


def open_trace(trace: RoutingTrace | Source) -> TraceReader:
    """A reader of a trace in memory, of a file, folder or pattern, or of several of these.

    Raises:
        InputError: as `TraceReader`, or if `trace` is none of these.
    """
    if isinstance(trace, RoutingTrace):
        return MemoryReader(trace)
    paths = [trace] if isinstance(trace, str | os.PathLike) else trace
    if not isinstance(paths, Sequence) or not paths or not all(isinstance(each, str | os.PathLike) for each in paths):
        raise InputError(f"trace is a {type(trace).__name__}; it should be a RoutingTrace, a path or a list of paths")
    return TraceReader(paths)
