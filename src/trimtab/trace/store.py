"""The Parquet file of a `RoutingTrace`: one row a sequence, its expert ids as bytes, the model's shape as metadata.

Several files, a folder of them, or a pattern such as `run/*.parquet` are one trace, in the order of their names. Row
groups are small, and readers and writers hold one at a time beside what they were asked for.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.errors import InputError
from trimtab.files import whole_file
from trimtab.trace.ahead import ahead
from trimtab.trace.coding import decode, encode
from trimtab.trace.routing import Array, RoutingTrace, id_dtype, no_route

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

FORMAT = "trimtab-routing-2"
ROW_GROUP_BYTES = 16 << 20
IDS = "expert_ids"
# Beside the ids of a row group, uncompressed: the other columns, and what Parquet adds.
BYTES_A_ROW = 1024

_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("prompt_length", pa.int32(), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("sequence_hash", pa.uint64(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field(IDS, pa.large_binary(), nullable=False),
    ]
)
_FACTS = [field.name for field in _SCHEMA if field.name != IDS]


def write_trace(trace: RoutingTrace | Iterable[RoutingTrace], path: str | os.PathLike[str]) -> None:
    """Write a trace, or the parts of one as they come, to a Parquet file, zstd-compressed.

    The file appears whole or not at all. Of parts, memory holds two at a time; all must be of one model.

    Raises:
        InputError: if there is no part, or parts are of different models.
    """
    parts = iter([trace]) if isinstance(trace, RoutingTrace) else ahead(trace)
    first = next(parts, None)
    if first is None:
        raise InputError(f"{path}: no sequences to write")
    schema = _SCHEMA.with_metadata({"trimtab": json.dumps(_header_of(first))})
    with (
        whole_file(path) as file,
        pq.ParquetWriter(
            file, schema, compression="zstd", compression_level=1, use_dictionary=["step", "domain"]
        ) as writer,
    ):
        for part in chain([first], parts):
            first.check_same_model(part)
            for group in _row_groups(part):
                writer.write_table(_table(group, schema))


def read_trace(source: Source, *, step: int | None = None) -> RoutingTrace:
    """Read a trace, checking every id. Ids within top_k come back in rising order.

    Args:
        source: a file, a folder, a pattern, or several of these.
        step: only sequences of this RL step.

    Raises:
        InputError: one line that names the file, if one is missing, not Parquet, not a trace, or damaged, or if files
            are of different models; or if there is no such step.
    """
    return TraceReader(source).read(step)


@dataclass(frozen=True, eq=False)
class SequenceFacts:
    """What a trace says of its S sequences, but for their routes; see `RoutingTrace`.

    Attributes:
        lengths: `[S]` int64, routed tokens.
        prompt_lengths: `[S]` int32.
        steps: `[S]` int32.
        sequence_hashes: `[S]` uint64.
        domains: `[S]` str.
    """

    lengths: Array
    prompt_lengths: Array
    steps: Array
    sequence_hashes: Array
    domains: Array


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
        self.empty: RoutingTrace = headers[0]
        for file, header in zip(self.files, headers, strict=True):
            with _naming(file):
                self.empty.check_same_model(header)
        self.facts = SequenceFacts(
            *(
                np.concatenate([getattr(each, name) for each in facts])
                for name in ("lengths", "prompt_lengths", "steps", "sequence_hashes", "domains")
            )
        )

    def chunks(self) -> Iterator[RoutingTrace]:
        """The trace in parts of some 16 MB of ids, every id checked."""
        for file in self.files:
            with _naming(file), pq.ParquetFile(file) as parquet:
                for group in range(parquet.num_row_groups):
                    yield _read_group(parquet, group, self.empty)

    def read(self, step: int | None = None) -> RoutingTrace:
        """The whole trace, or one step of it. Beside it, memory holds one chunk."""
        chosen = np.ones(len(self.facts.steps), bool) if step is None else self.facts.steps == step
        if step is not None and not chosen.any():
            steps = np.unique(self.facts.steps)
            known = f"it has steps {steps[0]} to {steps[-1]}" if len(steps) else "the trace is empty"
            raise InputError(f"{self.name}: no step {step}; {known}")
        lengths = self.facts.lengths[chosen]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        ids_TLK = np.empty((int(starts[-1]), *self.empty.expert_ids.shape[1:]), self.empty.expert_ids.dtype)
        row = token = 0
        for chunk in self.chunks():
            wanted = (
                chunk.select(np.flatnonzero(chosen[row : row + chunk.num_sequences])) if step is not None else chunk
            )
            ids_TLK[token : token + wanted.num_tokens] = wanted.expert_ids
            row += chunk.num_sequences
            token += wanted.num_tokens
        return RoutingTrace(
            expert_ids=ids_TLK,
            sequence_starts=starts,
            prompt_lengths=self.facts.prompt_lengths[chosen],
            steps=self.facts.steps[chosen],
            sequence_hashes=self.facts.sequence_hashes[chosen],
            domains=self.facts.domains[chosen],
            layer_indices=self.empty.layer_indices,
            num_experts=self.empty.num_experts,
            model=self.empty.model,
        )


def named_files(source: Source, pattern: str) -> list[Path]:
    """The files that a source names: itself, those of a folder or a pattern, or several of these; none twice.

    Args:
        pattern: which files of a folder.

    Raises:
        InputError: if there is no such file.
    """
    sources = [source] if isinstance(source, str | os.PathLike) else source
    found: dict[Path, None] = {}
    for each in map(Path, sources):
        if each.is_dir():
            names = sorted(file for file in each.glob(pattern) if file.is_file() and not file.name.startswith("."))
        elif each.exists() or not glob.has_magic(str(each)):
            names = [each]
        else:
            names = sorted(map(Path, glob.glob(str(each))))
        if not names or not names[0].is_file():
            raise InputError(f"{each}: {f'holds no {pattern}' if each.is_dir() else 'no such file'}")
        found |= dict.fromkeys(names)
    return list(found)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Whatever is wrong with a file is an InputError of one line that names it."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    except (pa.ArrowException, MemoryError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{file}: not a readable Parquet file ({reason})") from None


def _header_of(trace: RoutingTrace) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "num_experts": trace.num_experts,
        "top_k": trace.top_k,
        "layer_indices": trace.layer_indices.tolist(),
        "model": trace.model,
    }


def _row_groups(trace: RoutingTrace) -> Iterator[RoutingTrace]:
    """The trace in parts of whole sequences, each at most `ROW_GROUP_BYTES` of ids or one sequence."""
    token_bytes = max(1, trace.expert_ids[:1].nbytes)
    first = 0
    while first < trace.num_sequences:
        limit = trace.sequence_starts[first] + ROW_GROUP_BYTES // token_bytes
        end = max(first + 1, int(np.searchsorted(trace.sequence_starts, limit, side="right")) - 1)
        yield trace.part(first, end)
        first = end


def _table(trace: RoutingTrace, schema: pa.Schema) -> pa.Table:
    coded = np.empty_like(trace.expert_ids)
    encode(trace.expert_ids.reshape(-1, trace.top_k), coded.reshape(-1, trace.top_k))
    coded = np.ascontiguousarray(coded, coded.dtype.newbyteorder("<"))
    token_bytes = trace.num_layers * trace.top_k * coded.itemsize
    ids = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(),
        trace.num_sequences,
        [None, pa.py_buffer(trace.sequence_starts * token_bytes), pa.py_buffer(coded)],
    )
    facts = [
        pa.array(trace.steps),
        pa.array(trace.prompt_lengths),
        pa.array(trace.sequence_lengths.astype(np.int32)),
        pa.array(trace.sequence_hashes),
        pa.array(trace.domains.tolist(), pa.string()),
    ]
    return pa.Table.from_arrays([*facts, ids], schema=schema)


def _open(file: Path) -> tuple[RoutingTrace, SequenceFacts]:
    """A file's trace without sequences, and the facts of its sequences."""
    with _naming(file):
        with file.open("rb") as start:
            if start.read(4) != b"PAR1":
                raise InputError("not a Parquet file; what a framework recorded is converted by: trimtab trace import")
        with pq.ParquetFile(file) as parquet:
            return _read_facts(parquet)


def _read_facts(parquet: pq.ParquetFile) -> tuple[RoutingTrace, SequenceFacts]:
    header = _header(parquet.schema_arrow.metadata or {})
    missing = [field.name for field in _SCHEMA if field.name not in parquet.schema_arrow.names]
    if missing:
        raise InputError(f"a routing trace should have the column {missing[0]!r}")
    layers = np.asarray(header["layer_indices"], np.int32)
    empty = RoutingTrace.from_sequences(
        [],
        num_experts=header["num_experts"],
        shape=(len(layers), header["top_k"]),
        layer_indices=layers,
        model=header["model"],
    )
    return empty, _facts(parquet.read(_FACTS))


def _facts(table: pa.Table) -> SequenceFacts:
    table = _columns(table)
    lengths = table["num_tokens"].to_numpy().astype(np.int64)
    if lengths.min(initial=0) < 0:
        raise InputError(f"sequence {int(lengths.argmin())} claims {lengths.min()} tokens")
    return SequenceFacts(
        lengths=lengths,
        prompt_lengths=table["prompt_length"].to_numpy(),
        steps=table["step"].to_numpy(),
        sequence_hashes=table["sequence_hash"].to_numpy(),
        domains=np.array(table["domain"].to_pylist(), np.str_),
    )


def _read_group(parquet: pq.ParquetFile, group: int, empty: RoutingTrace) -> RoutingTrace:
    facts = _facts(parquet.read_row_group(group, _FACTS))
    token_bytes = empty.num_layers * empty.top_k * empty.expert_ids.itemsize
    claimed = parquet.metadata.row_group(group).total_byte_size
    expected = int(facts.lengths.sum()) * token_bytes
    if claimed > 2 * expected + BYTES_A_ROW * (len(facts.lengths) + 64):
        raise InputError(f"row group {group} claims {claimed} bytes; its sequences have {expected} bytes of expert ids")
    column = _columns(parquet.read_row_group(group, [IDS]))[IDS].combine_chunks()
    blocks = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
    _, offsets_buffer, data = blocks.buffers()
    offsets = np.frombuffer(offsets_buffer, "<i8")[blocks.offset : blocks.offset + len(blocks) + 1]
    sizes = np.diff(offsets)
    wrong = np.flatnonzero(sizes != facts.lengths * token_bytes)
    if len(wrong):
        row = int(wrong[0])
        raise InputError(
            f"sequence {row} of row group {group} holds {sizes[row]} bytes of expert ids; {facts.lengths[row]} tokens "
            f"x {empty.num_layers} layers x top-{empty.top_k} need {facts.lengths[row] * token_bytes}"
        )
    coded = np.frombuffer(data if data is not None else b"", np.uint8)[offsets[0] : offsets[-1]]
    dtype = empty.expert_ids.dtype
    coded_NK = coded.view(dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(-1, empty.top_k)
    ids_NK = np.empty_like(coded_NK)
    bad = decode(coded_NK, empty.num_experts, no_route(empty.num_experts), ids_NK)
    chunk = RoutingTrace(
        expert_ids=ids_NK.reshape(-1, *empty.expert_ids.shape[1:]),
        sequence_starts=np.concatenate([[0], np.cumsum(facts.lengths)]),
        prompt_lengths=facts.prompt_lengths,
        steps=facts.steps,
        sequence_hashes=facts.sequence_hashes,
        domains=facts.domains,
        layer_indices=empty.layer_indices,
        num_experts=empty.num_experts,
        model=empty.model,
    )
    if bad >= 0:
        with _in_row_group(group):
            chunk.check()
    return chunk


@contextmanager
def _in_row_group(group: int) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"row group {group}: {error}") from None


def _columns(table: pa.Table) -> pa.Table:
    """The table in our types, every value checked."""
    table = table.cast(pa.schema([_SCHEMA.field(name) for name in table.column_names]))
    table.validate(full=True)
    return table


def _header(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    try:
        header = json.loads(metadata[b"trimtab"])
        form = header["format"]
        shape_ok = (
            isinstance(header["num_experts"], int)
            and isinstance(header["top_k"], int)
            and header["top_k"] >= 1
            and len(header["layer_indices"]) >= 1
            and all(isinstance(layer, int) for layer in header["layer_indices"])
            and isinstance(header["model"], str)
        )
        id_dtype(header["num_experts"])
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError):
        raise InputError("a Parquet file, but not a routing trace written by Trimtab") from None
    if form != FORMAT:
        raise InputError(f"written in format {form!r}; this version reads {FORMAT!r}")
    if not shape_ok:
        raise InputError("its header gives no valid num_experts, top_k, layer_indices and model")
    return dict(header)
