"""Trace files: writing them, and reading one or several as one trace.

Several files, a folder of them, or a pattern such as `run/*.parquet` are one trace, in the order of their names. Row
groups are small; readers and writers keep one in memory in addition to their result.

Arrow is imported when a file is read or written: a run that has its routing in memory does without.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.files import atomic_file
from trimtab.messages import note_once
from trimtab.trace.message_text import few_of
from trimtab.trace.parquet_footer import read_columns
from trimtab.trace.routing import RoutingTrace, SequenceFacts, joined_notes

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

ROW_GROUP_BYTES = 16 << 20
CONVERTED = "what a framework recorded is converted by: trimtab trace import"
OTHER_FORMATS = (".json", ".jsonl", ".csv", ".npy", ".npz", ".safetensors", ".pt", ".pkl")


def write_trace(
    trace: RoutingTrace | Iterable[RoutingTrace],
    path: str | os.PathLike[str],
    *,
    notes: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Write a trace, or an iterable of its parts, to a Parquet file, zstd-compressed.

    Writes are atomic. Two parts are in memory at a time; all must be of one model.

    Args:
        notes: those of the trace, beside those of its first part; called when all parts are there.

    Raises:
        InputError: if there is no part, parts are of different models, or the file's name is one of another format.
    """
    import pyarrow.parquet as pq

    from trimtab.trace.row_groups import MOST_NOTES, NOTES, schema_of, table_of

    if Path(path).suffix in OTHER_FORMATS:
        raise InputError(f"{path}: would hold Parquet; name it {Path(path).stem}.parquet")
    parts = iter([trace]) if isinstance(trace, RoutingTrace) else prefetch(trace)
    first = next(parts, None)
    if first is None:
        raise InputError(f"{path}: no sequences to write")
    schema = schema_of(first)
    with (
        atomic_file(path) as file,
        pq.ParquetWriter(
            file, schema, compression="zstd", compression_level=1, use_dictionary=["step", "domain"]
        ) as writer,
    ):
        for part in chain([first], parts):
            first.check_same_model(part)
            for group in _row_groups(part):
                writer.write_table(table_of(group, schema))
        if texts := list(dict.fromkeys([*first.notes, *notes()]))[:MOST_NOTES]:
            writer.add_key_value_metadata({NOTES.decode(): json.dumps(texts)})


def read_trace(source: Source, *, step: int | None = None) -> RoutingTrace:
    """Read a trace, checking every id. Ids within top_k are returned in ascending order.

    Args:
        source: a file, a folder, a pattern, or several of these.
        step: only sequences of this RL step.

    Raises:
        InputError: one line that names the file, if one is missing, not Parquet, not a trace, or damaged, or if files
            are of different models; or if there is no such step.
    """
    return TraceReader(source).read(step)


class TraceReader:
    """One or several trace files as one trace, read a chunk at a time.

    Opening reads everything but the ids.

    Attributes:
        files: the files, in their order.
        empty: the trace without its sequences: number of experts, layers, top_k, model.
        facts: of all sequences.

    Raises:
        InputError: as `read_trace`.
    """

    def __init__(self, source: Source) -> None:
        self.files = named_files(source, "*.parquet")
        self.name = str(self.files[0]) if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1} more"
        headers, facts = zip(*(_open(file) for file in self.files), strict=True)
        self.empty: RoutingTrace = replace(headers[0], notes=joined_notes(headers))
        for file, header in zip(self.files, headers, strict=True):
            with _naming(file):
                self.empty.check_same_model(header)
        self.facts: SequenceFacts = facts[0].joined(*facts[1:])

    def chunks(self) -> Iterator[RoutingTrace]:
        """Yields the trace in parts of about 16 MB of ids; every id is checked."""
        return read_chunks(self.chunk_places(), self.empty)

    def chunk_places(self) -> list[ChunkPlace]:
        """Where each chunk is, in the order of `chunks`."""
        from trimtab.trace.row_groups import open_parquet

        places: list[ChunkPlace] = []
        row = 0
        for file in self.files:
            with _naming(file), open_parquet(file) as parquet:
                for group in range(parquet.num_row_groups):
                    places.append(ChunkPlace(file, group, row))
                    row += parquet.metadata.row_group(group).num_rows
        return places

    def read(self, step: int | None = None) -> RoutingTrace:
        """The whole trace, or one step of it. Beside it, memory holds one chunk."""
        if step is None:
            return self.read_sequences(np.arange(len(self.facts.steps)))
        chosen = np.flatnonzero(self.facts.steps == step)
        if not len(chosen):
            steps = np.unique(self.facts.steps)
            known = f"it has steps {steps[0]} to {steps[-1]}" if len(steps) else "the trace is empty"
            raise InputError(f"{self.name}: no step {step}; {known}")
        return self.read_sequences(chosen)

    def by_step(self) -> RoutingTrace:
        """The whole trace, its steps one after another, so that those are views of it."""
        return self.read_sequences(np.argsort(self.facts.steps, kind="stable"))

    def read_sequences(self, chosen: Array) -> RoutingTrace:
        """Some sequences, indices `[N]` in any order. Chunks without any are not read; memory holds one beside."""
        facts = self.facts.select(chosen)
        ids_TLK = np.empty((int(facts.lengths.sum()), *self.empty.expert_ids.shape[1:]), self.empty.expert_ids.dtype)
        order, starts = np.argsort(chosen), np.cumsum(facts.lengths) - facts.lengths
        places = self.chunk_places()
        ends = np.searchsorted(chosen[order], [*(place.first for place in places[1:]), len(self.facts.steps)])
        of_place = zip(places, np.split(order, ends[:-1]), strict=False)
        wanted = [(place, mine) for place, mine in of_place if len(mine)]
        chunks = read_chunks([place for place, _ in wanted], self.empty)
        for place, mine in wanted:
            chunk = next(chunks)
            for each in mine.tolist():
                rows = chunk.sequence(int(chosen[each]) - place.first)
                ids_TLK[starts[each] : starts[each] + len(rows)] = rows
            # Before the next one is read.
            del chunk, rows
        return self.empty.with_sequences(facts, ids_TLK)


class ChunkPlace(NamedTuple):
    """A chunk of a trace: a row group of one of its files. `first` is the index in the trace of its first sequence."""

    file: Path
    group: int
    first: int


def read_chunks(places: Iterable[ChunkPlace], empty: RoutingTrace) -> Iterator[RoutingTrace]:
    """Yields chunks of a trace's files, which a `TraceReader` has checked.

    Args:
        empty: the trace without its sequences.

    Raises:
        InputError: one line that names the file, if it is gone or damaged.
    """
    import pyarrow as pa

    from trimtab.trace.row_groups import open_parquet, read_group

    for file, chunks in groupby(places, key=lambda place: place.file):
        with _naming(file), open_parquet(file) as parquet:
            for place in chunks:
                yield read_group(parquet, place.group, empty)
                # Else it keeps about 100 MB of what it read.
                pa.default_memory_pool().release_unused()


def named_files(source: Source, pattern: str) -> list[Path]:
    """The files of a source: a file, a folder, a pattern, or several of these. A file given twice is noted, and is in
    the list once.

    Args:
        pattern: which files of a folder.

    Raises:
        InputError: if there is no such file.
    """
    files: dict[str, Path] = {}
    twice: list[str] = []
    for each in _paths(source):
        if each.is_dir():
            names = sorted(file for file in each.glob(pattern) if file.is_file() and not file.name.startswith("."))
        elif each.exists() or not glob.has_magic(str(each)):
            names = [each]
        else:
            names = sorted(map(Path, glob.glob(str(each))))
        if not names or not names[0].is_file():
            hint = f"; {CONVERTED}" if pattern != "*" else ""
            raise InputError(f"{each}: {f'holds no {pattern}{hint}' if each.is_dir() else 'no such file'}")
        twice += [str(name) for name in names if files.setdefault(os.path.realpath(name), name) is not name]
    if twice:
        note_once(f"given twice, and read once: {few_of(twice)}")
    return list(files.values())


def found_files(source: Source, files: Sequence[Path]) -> frozenset[Path]:
    """Those of the files that are from a folder or a pattern of the source."""
    return frozenset(files).difference(_paths(source))


def _paths(source: Source) -> list[Path]:
    return list(map(Path, [source] if isinstance(source, str | os.PathLike) else source))


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Converts errors into a one-line InputError that names the file."""
    import pyarrow as pa

    try:
        yield
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    except (pa.ArrowException, MemoryError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{file}: not a readable Parquet file ({reason})") from None


def prefetch(parts: Iterable[Any]) -> Iterator[Any]:
    """Yields the same parts; a second thread computes each while its predecessor is used."""
    source = iter(parts)
    with ThreadPoolExecutor(1) as pool:
        next_part = pool.submit(next, source, None)
        while (part := next_part.result()) is not None:
            next_part = pool.submit(next, source, None)
            yield part


def _row_groups(trace: RoutingTrace) -> Iterator[RoutingTrace]:
    """The trace in parts of whole sequences, each at most `ROW_GROUP_BYTES` of ids or one sequence."""
    token_bytes = max(1, trace.expert_ids[:1].nbytes)
    first = 0
    while first < trace.num_sequences:
        limit = trace.sequence_starts[first] + ROW_GROUP_BYTES // token_bytes
        end = max(first + 1, int(np.searchsorted(trace.sequence_starts, limit, side="right")) - 1)
        yield trace.part(first, end)
        first = end


def _open(file: Path) -> tuple[RoutingTrace, SequenceFacts]:
    """A file's trace without sequences, and the facts of its sequences."""
    from trimtab.trace.row_groups import open_parquet, read_facts

    with _naming(file):
        with file.open("rb") as start:
            if start.read(4) != b"PAR1":
                raise InputError(f"not a Parquet file; {CONVERTED}")
        columns = read_columns(file)
        with open_parquet(file) as parquet:
            return read_facts(parquet, file.stat().st_size, columns)


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
            sequences = map(trace.sequence, range(trace.num_sequences))
            if any((ids_tLK[..., 1:] < ids_tLK[..., :-1]).any() for ids_tLK in sequences):
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

    def by_step(self) -> RoutingTrace:
        """The trace as it is."""
        return self._trace

    def read_sequences(self, chosen: Array) -> RoutingTrace:
        """Some sequences, ascending indices `[N]`, without a copy of consecutive ones."""
        return self._trace.shared(chosen)


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
