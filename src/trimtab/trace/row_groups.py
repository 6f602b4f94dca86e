"""Row groups of a trace's file: one row per sequence, its expert ids encoded as bytes, the model's shape as metadata.

Files are untrusted: sizes are checked against each other and against the file's before memory is allocated, and all
values are checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.kernels import kernel
from trimtab.trace.message_text import at_place, printable, short
from trimtab.trace.numbering import Numbering
from trimtab.trace.parquet_footer import Column
from trimtab.trace.routing import RoutingTrace, SequenceFacts, Windows, check_windows, no_route, windows_array

FORMAT = "trimtab-routing-2"
IDS = "expert_ids"
WINDOWS = "windows"
PROMPT = "prompt_hash"
# Most windows of a sequence in a file.
MOST_WINDOWS = 4096
# Beside the ids of a row group, uncompressed: the other columns, and what Parquet adds.
BYTES_A_ROW = 1024
# Key of what was odd in an import; Parquet writes it last.
NOTES, MOST_NOTES = b"trimtab-notes", 16
# Of names of domains and models, and of layers; the index of a layer is below the second number.
MOST_LETTERS = 256
MOST_LAYERS, LAYER_INDICES = 4096, 1 << 20
# What a file may claim to hold in memory: so many bytes, and so many times its size. Ids of synthetic presets take
# 1.5 times their file.
CLAIMED_BYTES, CLAIMED_TIMES = 512 << 20, 64
# Memory of the facts of a sequence, with a short name, and of a window.
FACTS_BYTES, WINDOW_BYTES = 128, 192

_WINDOW = pa.struct([pa.field("version", pa.int32(), nullable=False), pa.field("rows", pa.int32(), nullable=False)])
_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("prompt_length", pa.int32(), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("sequence_hash", pa.uint64(), nullable=False),
        pa.field(PROMPT, pa.uint64(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field(WINDOWS, pa.list_(_WINDOW), nullable=False),
        pa.field(IDS, pa.large_binary(), nullable=False),
    ]
)
_DOMAIN_CODES = pa.dictionary(pa.int32(), pa.string())
_FACTS = [field.name for field in _SCHEMA if field.name not in (IDS, WINDOWS, PROMPT)]


def schema_of(trace: RoutingTrace) -> pa.Schema:
    """The columns, with the model's shape as metadata.

    Raises:
        InputError: if the model's name is too long, or the layers are none that a file may have.
    """
    header = {
        "format": FORMAT,
        "num_experts": trace.num_experts,
        "top_k": trace.top_k,
        "layer_indices": trace.layer_indices.tolist(),
        "model": trace.model,
        "sampled": trace.sampled,
    }
    if trace.numbering is not None:
        header["numbering"] = trace.numbering.to_json()
    _check_header(header)
    return _SCHEMA.with_metadata({"trimtab": json.dumps(header)})


def table_of(trace: RoutingTrace, schema: pa.Schema) -> pa.Table:
    """The rows of a trace, ids coded. Raises InputError if the name of a domain is too long."""
    _check_letters(int(np.char.str_len(trace.domains).max(initial=0)))
    coded = np.empty_like(trace.expert_ids)
    encode(trace.expert_ids.reshape(-1, trace.top_k), coded.reshape(-1, trace.top_k))
    coded = np.ascontiguousarray(coded, coded.dtype.newbyteorder("<"))
    token_bytes = trace.num_layers * trace.top_k * coded.itemsize
    ids = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(),
        trace.num_sequences,
        [None, pa.py_buffer(trace.sequence_starts * token_bytes), pa.py_buffer(coded)],
    )
    names = [name.encode() for name in trace.domains.tolist()]
    domains = pa.StringArray.from_buffers(len(names), pa.py_buffer(_starts(names)), pa.py_buffer(b"".join(names)))
    rows_W2 = np.array([row for windows in trace.windows for row in windows], np.int32).reshape(-1, 2)
    windows = pa.StructArray.from_arrays(list(map(_numbers, rows_W2.T)), fields=list(_WINDOW))
    lists = pa.ListArray.from_arrays(_numbers(_starts(trace.windows)), windows)
    lengths = trace.sequence_lengths.astype(np.int32)
    numbers = map(_numbers, (trace.steps, trace.prompt_lengths, lengths, trace.sequence_hashes, trace.prompt_hashes))
    return pa.Table.from_arrays([*numbers, domains, lists, ids], schema=schema)


def _starts(parts: Iterable[Any]) -> Array:
    """`[parts + 1]` int32, where each part starts if all are in one buffer, and the end."""
    return np.cumsum([0, *map(len, parts)], dtype=np.int32)


# `pa.array` and `to_numpy` import pandas where it is installed, and ignore Ctrl-C during that import.
def _numbers(values: Array) -> pa.Array:
    """The values as an Arrow array."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


def _values(column: pa.Array | pa.ChunkedArray) -> Array:
    """The numbers of a column, none of which is missing, as a numpy array."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    dtype = np.dtype(str(array.type))
    return np.frombuffer(array.buffers()[1] or b"", dtype, len(array), array.offset * dtype.itemsize).copy()


def read_facts(
    parquet: pq.ParquetFile, size: int, columns: Sequence[Sequence[Column]]
) -> tuple[RoutingTrace, SequenceFacts]:
    """A file's trace without sequences, and the facts of its sequences.

    Args:
        parquet: opened by `open_parquet`.
        size: of the file, in bytes.
        columns: what its footer claims (`read_columns`).

    Raises:
        InputError: if it isn't a trace, or claims more than a file of its size can hold.
    """
    header = _header(parquet.schema_arrow.metadata or {})
    allowed = CLAIMED_BYTES + CLAIMED_TIMES * size
    missing = [name for name in (*_FACTS, IDS) if name not in parquet.schema_arrow.names]
    if missing:
        raise InputError(f"a routing trace should have the column {missing[0]!r}")
    layers = np.asarray(header["layer_indices"], np.int32)
    numbering = header.get("numbering")
    if numbering is not None:
        numbering = Numbering.from_json(numbering, "the numbering in its header")
    empty = RoutingTrace.from_sequences(
        [],
        num_experts=header["num_experts"],
        shape=(len(layers), header["top_k"]),
        layer_indices=layers,
        model=header["model"],
        # Files of earlier versions don't say it.
        sampled=float(header.get("sampled", 1.0)),
    )
    empty = replace(empty, numbering=numbering, notes=_notes(parquet.metadata.metadata or {}))
    rows = parquet.metadata.num_rows
    _check_claim(rows * FACTS_BYTES, allowed, f"{rows} sequences")
    if len(columns) != parquet.num_row_groups:
        raise InputError("not a readable Parquet file (its footer is damaged)")
    all_windows = 0
    for group, claims in enumerate(columns):
        in_group = parquet.metadata.row_group(group).num_rows
        claimed = sum(column.uncompressed_bytes for column in claims if not column.path.startswith(IDS))
        most = BYTES_A_ROW * (in_group + 64)
        _check_claim(claimed, most, f"row group {group}: {claimed} bytes beside the expert ids")
        for column in claims:
            if "." not in column.path and column.num_values != in_group:
                raise InputError(f"row group {group} has {in_group} sequences, and {column.num_values} {column.path}")
        windows = max((column.num_values for column in claims if column.path.startswith(f"{WINDOWS}.")), default=0)
        if windows > in_group * MOST_WINDOWS:
            raise InputError(f"its sequences claim {windows} windows; one has at most {MOST_WINDOWS}")
        # An empty list is one value.
        all_windows += max(0, windows - in_group)
    _check_claim(all_windows * WINDOW_BYTES, allowed, f"{all_windows} windows")
    facts = _facts(parquet, range(parquet.num_row_groups))
    tokens = int(facts.lengths.sum())
    _check_claim(tokens * empty.num_layers * empty.top_k * empty.expert_ids.itemsize, allowed, f"{tokens} tokens")
    return empty, facts


def open_parquet(path: str | os.PathLike[str]) -> pq.ParquetFile:
    """A trace's file for reading. Domains are read as codes and names."""
    try:
        return pq.ParquetFile(path, read_dictionary=["domain"])
    except KeyError:  # not a trace
        return pq.ParquetFile(path)


def _facts(parquet: pq.ParquetFile, groups: Sequence[int]) -> SequenceFacts:
    # Files of earlier versions have no column of prompts.
    has_prompts = PROMPT in parquet.schema_arrow.names
    table = _columns(parquet.read_row_groups(groups, [*_FACTS, PROMPT] if has_prompts else _FACTS))
    lengths = _values(table["num_tokens"]).astype(np.int64)
    if lengths.min(initial=0) < 0:
        raise InputError(f"sequence {int(lengths.argmin())} claims {lengths.min()} tokens")
    for name, what in (("step", "step"), ("prompt_length", "prompt length")):
        values = _values(table[name])
        if values.min(initial=0) < 0:
            raise InputError(f"sequence {int(values.argmin())} has {what} {values.min()}; it should be at least 0")
    return SequenceFacts(
        lengths=lengths,
        prompt_lengths=_values(table["prompt_length"]),
        steps=_values(table["step"]),
        sequence_hashes=_values(table["sequence_hash"]),
        prompt_hashes=_values(table[PROMPT]) if has_prompts else np.zeros(len(lengths), np.uint64),
        domains=_domains(table["domain"]),
        windows=windows_array(_windows(parquet, groups, lengths)),
    )


def _domains(column: pa.ChunkedArray) -> Array:
    """`[S]` names. Every row has the width of the longest one."""
    codes = column.unify_dictionaries().combine_chunks()
    _check_letters(pc.max(pc.utf8_length(codes.dictionary)).as_py() or 0)
    return np.array(codes.dictionary.to_pylist(), np.str_)[_values(codes.indices)]


def _check_letters(longest: int) -> None:
    if longest > MOST_LETTERS:
        raise InputError(f"a domain has {longest} letters; names have at most {MOST_LETTERS}")


def _windows(parquet: pq.ParquetFile, groups: Sequence[int], lengths: Array) -> list[Windows]:
    """Windows of every sequence; none in files of earlier versions.

    Raises:
        InputError: if they are no windows, too many, or have other numbers of rows than their sequences.
    """
    found: list[Windows] = [()] * len(lengths)
    if WINDOWS not in parquet.schema_arrow.names:
        return found
    if parquet.schema_arrow.field(WINDOWS).type != _SCHEMA.field(WINDOWS).type:
        raise InputError(f"the column {WINDOWS!r} should be a {_SCHEMA.field(WINDOWS).type}")
    first = 0
    for group in groups:
        lists = _columns(parquet.read_row_group(group, [WINDOWS]))[WINDOWS].combine_chunks()
        columns = [lists.flatten(), *lists.flatten().flatten()]
        if any(each.null_count for each in columns):
            raise InputError(f"a value of the column {WINDOWS!r} is missing")
        rows_W2 = np.stack(list(map(_values, columns[1:])), axis=1)
        ends = np.cumsum(_values(lists.value_lengths()))
        for index in np.flatnonzero(np.diff(ends, prepend=0)).tolist():
            part = slice(ends[index - 1] if index else 0, ends[index])
            windows = tuple(map(tuple, rows_W2[part].tolist()))
            check_windows(windows, first + index, lengths[first + index])
            found[first + index] = windows
        first += parquet.metadata.row_group(group).num_rows
    return found


def read_group(parquet: pq.ParquetFile, group: int, empty: RoutingTrace) -> RoutingTrace:
    """The sequences of a row group, every id checked.

    Raises:
        InputError: naming the row group, if its sizes don't fit together or an id is none.
    """
    facts = _facts(parquet, [group])
    token_bytes = empty.num_layers * empty.top_k * empty.expert_ids.itemsize
    claimed = parquet.metadata.row_group(group).total_byte_size
    expected = int(facts.lengths.sum()) * token_bytes
    if claimed > 2 * expected + BYTES_A_ROW * (len(facts.lengths) + 64):
        raise InputError(f"row group {group} claims {claimed} bytes; its sequences have {expected} bytes of expert ids")
    # One column: threads gain nothing, and each keeps memory of its own.
    blocks = _columns(parquet.read_row_group(group, [IDS], use_threads=False))[IDS].combine_chunks()
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
    chunk = empty.with_sequences(facts, ids_NK.reshape(-1, *empty.expert_ids.shape[1:]))
    if bad >= 0:
        with at_place(f"row group {group}"):
            chunk.check()
    return chunk


def _check_claim(claimed: int, allowed: int, what: str) -> None:
    if claimed > allowed:
        raise InputError(f"the file claims to have {what}, which is more than a file of its size can hold")


def _columns(table: pa.Table) -> pa.Table:
    """The table in our types, every value checked. Domains have a dictionary."""
    fields = [
        _SCHEMA.field(name).with_type(_DOMAIN_CODES) if name == "domain" else _SCHEMA.field(name)
        for name in table.column_names
    ]
    table = table.cast(pa.schema(fields))
    table.validate(full=True)
    return table


def _header(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    try:
        header = dict(json.loads(metadata[b"trimtab"]))
        form = header["format"]
    except (KeyError, TypeError, ValueError, RecursionError):
        raise InputError("a Parquet file, but not a routing trace written by Trimtab") from None
    if form != FORMAT:
        raise InputError(f"written in format {short(form)}; this version reads {FORMAT!r}")
    _check_header(header)
    return header


def _notes(metadata: Mapping[bytes, bytes]) -> tuple[str, ...]:
    """What was odd when the trace was imported."""
    try:
        notes = json.loads(metadata.get(NOTES, b"[]"))
    except (ValueError, RecursionError):
        notes = None
    if not isinstance(notes, list) or len(notes) > MOST_NOTES or not all(isinstance(note, str) for note in notes):
        raise InputError(f"its {NOTES.decode()} should be a list of at most {MOST_NOTES} texts")
    return tuple(printable(note[: 2 * MOST_LETTERS], " ") for note in notes)


def _check_header(header: Mapping[str, Any]) -> None:
    """Raises InputError if a value of a header has another type than it should, or is out of range."""
    layers = header.get("layer_indices")
    if not (isinstance(layers, list) and 1 <= len(layers) <= MOST_LAYERS and len(set(map(str, layers))) == len(layers)):
        raise InputError(f"its header should have 1 to {MOST_LAYERS} different layer_indices, not {short(layers)}")
    for layer in layers:
        _check_number("a layer index", layer, 0, LAYER_INDICES - 1)
    experts = header.get("num_experts")
    _check_number("num_experts", experts, 1, np.iinfo(np.uint16).max)
    _check_number("top_k", header.get("top_k"), 1, experts)
    sampled = header.get("sampled", 1.0)
    if type(sampled) not in (int, float) or not 0 < sampled <= 1:
        raise InputError(f"its header should have sampled above 0 to 1, not {short(sampled)}")
    model = header.get("model")
    if not isinstance(model, str) or len(model) > MOST_LETTERS:
        raise InputError(f"its header should have a model of at most {MOST_LETTERS} letters, not {short(model)}")


def _check_number(name: str, value: Any, least: int, most: Any) -> None:
    if type(value) is not int or not least <= value <= most:
        raise InputError(f"its header should have {name} from {least} to {most}, not {short(value)}")


BLOCK = 64


@kernel
def encode(ids_NK, coded_NK):  # type: ignore[no-untyped-def]
    """Write the encoded rows of `ids_NK` (uint8 or uint16) to `coded_NK`, of the same dtype. Differences wrap."""
    rows, top_k = ids_NK.shape
    # A block at a time, one position of top_k after the other, so a comparison is one instruction for many rows.
    lanes_KB = np.empty((top_k, BLOCK), ids_NK.dtype)
    for start in range(0, rows, BLOCK):
        size = min(BLOCK, rows - start)
        for b in range(size):
            for k in range(top_k):
                lanes_KB[k, b] = ids_NK[start + b, k]
        for turn in range(top_k):
            for k in range(turn % 2, top_k - 1, 2):
                low_B, high_B = lanes_KB[k], lanes_KB[k + 1]
                for b in range(BLOCK):
                    one, other = low_B[b], high_B[b]
                    low_B[b] = min(one, other)
                    high_B[b] = max(one, other)
        for k in range(top_k - 1, 0, -1):
            low_B, high_B = lanes_KB[k - 1], lanes_KB[k]
            for b in range(BLOCK):
                high_B[b] -= low_B[b]
        for b in range(size):
            for k in range(top_k):
                coded_NK[start + b, k] = lanes_KB[k, b]


@kernel
def decode(coded_NK, num_experts, no_route, ids_NK):  # type: ignore[no-untyped-def]
    """Write the rows that `encode` encoded to `ids_NK`, with ascending ids within a row.

    Returns:
        The first row whose ids are neither distinct and below `num_experts` nor all `no_route`; -1 if there is none.
    """
    bad = -1
    for n in range(coded_NK.shape[0]):
        expert = np.int64(coded_NK[n, 0])
        ids_NK[n, 0] = expert
        unknown = expert == no_route
        fine = unknown or expert < num_experts
        for k in range(1, coded_NK.shape[1]):
            difference = np.int64(coded_NK[n, k])
            expert += difference
            ids_NK[n, k] = expert
            fine &= difference == 0 if unknown else (difference > 0 and expert < num_experts)
        if not fine and bad < 0:
            bad = n
    return bad
