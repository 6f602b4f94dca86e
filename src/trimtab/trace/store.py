"""The Parquet file of a `RoutingTrace`: one row a sequence, its expert ids as bytes, the model's shape as metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.errors import InputError
from trimtab.trace.routing import RoutingTrace, id_dtype

FORMAT = "trimtab-routing-1"
ROW_GROUP_BYTES = 16 << 20
IDS = "expert_ids"

_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("prompt_length", pa.int32(), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("sequence_hash", pa.uint64(), nullable=False),
        pa.field("expert_ids", pa.large_binary(), nullable=False),
    ]
)


def write_trace(trace: RoutingTrace, path: str | os.PathLike[str]) -> None:
    """Write a trace to a Parquet file, zstd-compressed. The file appears whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {
        "format": FORMAT,
        "num_experts": trace.num_experts,
        "top_k": trace.top_k,
        "layer_indices": trace.layer_indices.tolist(),
        "model": trace.model,
    }
    little_endian = np.ascontiguousarray(trace.expert_ids, trace.expert_ids.dtype.newbyteorder("<"))
    token_bytes = trace.num_layers * trace.top_k * little_endian.itemsize
    ids = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(),
        trace.num_sequences,
        [None, pa.py_buffer(trace.sequence_starts * token_bytes), pa.py_buffer(little_endian)],
    )
    table = pa.Table.from_arrays(
        [
            pa.array(trace.steps),
            pa.array(trace.prompt_lengths),
            pa.array(trace.sequence_lengths.astype(np.int32)),
            pa.array(trace.sequence_hashes),
            ids,
        ],
        schema=_SCHEMA.with_metadata({"trimtab": json.dumps(header)}),
    )
    mean_bytes = max(1, little_endian.nbytes // max(1, trace.num_sequences))
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        pq.write_table(table, partial, compression="zstd", row_group_size=max(1, ROW_GROUP_BYTES // mean_bytes))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_trace(path: str | os.PathLike[str]) -> RoutingTrace:
    """Read a trace written by `write_trace`, and check it. Beside the trace, memory holds one row group at a time.

    Raises:
        InputError: one line that names the file, if it is missing, not Parquet, not a trace, or damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected a routing trace (.parquet)")
    try:
        with pq.ParquetFile(path) as file:
            trace = _read(file)
        trace.check()
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (pa.ArrowException, MemoryError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path}: not a readable Parquet file ({reason})") from None
    return trace


def _read(file: pq.ParquetFile) -> RoutingTrace:
    header = _header(file.schema_arrow.metadata or {})
    missing = [field.name for field in _SCHEMA if field.name not in file.schema_arrow.names]
    if missing:
        raise InputError(f"a routing trace should have the column {missing[0]!r}")
    num_experts, top_k = header["num_experts"], header["top_k"]
    layers = np.asarray(header["layer_indices"], np.int32)
    facts = _columns(file.read([field.name for field in _SCHEMA if field.name != IDS]))
    lengths = facts["num_tokens"].to_numpy().astype(np.int64)
    if lengths.min(initial=0) < 0:
        raise InputError(f"sequence {int(lengths.argmin())} claims {lengths.min()} tokens")
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids_TLK = np.empty((int(starts[-1]), len(layers), top_k), id_dtype(num_experts))
    row = 0
    for group in range(file.num_row_groups):
        for value in _columns(file.read_row_group(group, [IDS]))[IDS]:
            block, length = np.frombuffer(value.as_buffer(), np.uint8), lengths[row]
            ids = ids_TLK[starts[row] : starts[row + 1]]
            if len(block) != ids.nbytes:
                raise InputError(
                    f"sequence {row} holds {len(block)} bytes of expert ids; {length} tokens x {len(layers)} layers x "
                    f"top-{top_k} need {ids.nbytes}"
                )
            ids[:] = block.view(ids.dtype.newbyteorder("<")).reshape(ids.shape)
            row += 1
    return RoutingTrace(
        expert_ids=ids_TLK,
        sequence_starts=starts,
        prompt_lengths=facts["prompt_length"].to_numpy(),
        steps=facts["step"].to_numpy(),
        sequence_hashes=facts["sequence_hash"].to_numpy(),
        layer_indices=layers,
        num_experts=num_experts,
        model=header["model"],
    )


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
    except (KeyError, TypeError, ValueError):
        raise InputError("a Parquet file, but not a routing trace written by Trimtab") from None
    if form != FORMAT:
        raise InputError(f"written in format {form!r}; this version reads {FORMAT!r}")
    if not shape_ok:
        raise InputError("its header gives no valid num_experts, top_k, layer_indices and model")
    return dict(header)
