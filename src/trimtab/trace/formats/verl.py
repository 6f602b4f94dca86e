"""verl: batches with a key `routed_experts`, `[batch, total_len, layers, top_k]`, zeros where there is no record.

verl (`verl/experimental/agent_loop`) pads prompts on the left and responses on the right and writes the routes of
every sequence behind its left padding. A batch comes as `DataProto.save_to_disk` pickles it (`verl/protocol.py`: the
bytes of `torch.save` of a TensorDict, or its arrays), as a `torch.save` of a dictionary or TensorDict, as `.npz`, or as
the bare array in a `.npy`. Without padding (nested tensors), every sequence is a row of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers import torch_files
from trimtab.trace.containers.array_files import array_names
from trimtab.trace.containers.tensors import (
    NPY_MAGIC,
    TORCH_DTYPES,
    DType,
    Jagged,
    LatinBytes,
    NumpyArray,
    Storage,
    Tensor,
    buffer_of,
)
from trimtab.trace.containers.unpickling import OpaqueObject
from trimtab.trace.formats import dump_fields as fields
from trimtab.trace.formats.dump_fields import field
from trimtab.trace.formats.records import Dropped, ImportOptions, Record

KEY = "routed_experts"
# Beside the routes, in an .npz that is a batch.
BATCH = frozenset(("attention_mask", "input_ids", "prompts", "responses"))
_NEMO_RL_KEYS = ("input_lengths", "unpadded_sequence_lengths", "message_log")


def recognise(path: Path) -> bool:
    """A pickle of a DataProto, or a dictionary with `routed_experts` that is not NeMo-RL's, or a bare 4-D `.npy`."""
    try:
        with path.open("rb") as file:
            start = file.read(256)
    except OSError:
        return False
    if start.startswith(NPY_MAGIC):
        return start.count(b",", start.find(b"'shape'"), start.find(b")")) == 3 and b"'descr': '" in start
    if torch_files.looks_loadable(path) and b"verl.protocol" in start and b"DataProto" in start:
        return True
    names = array_names(path)
    if names and names != [""] and BATCH.isdisjoint(names):
        return False
    found = torch_files.mentions(path, KEY, f"<NJT_VALUES>{KEY}", "topk_ids_of_layer", *_NEMO_RL_KEYS)
    return bool(found) and found <= {KEY, f"<NJT_VALUES>{KEY}"}


def read(path: Path, options: ImportOptions) -> Iterator[Record | Dropped]:
    """The records of a dump, one per row of the batch."""
    dump = torch_files.load(path)
    return records_of_batch({KEY: dump} if isinstance(dump, NumpyArray | Tensor) else dump)


def records_of_batch(batch: Any) -> Iterator[Record | Dropped]:
    """The records of a `DataProto`, a TensorDict, or a dictionary of tensors or arrays.

    Reads `routed_experts` and, if present, `attention_mask`, `input_ids`, `prompts`, `response_mask`, the label
    `data_source` and `meta_info["global_steps"]`. Without `attention_mask`, rows of zeros at both ends are padding.
    """
    tensors, labels, facts = _parts(batch)
    routes = fields.required(tensors, KEY, "verl writes it with rollout.enable_rollout_routing_replay=True")
    step = fields.whole_number(field(facts, "global_steps"))
    sources = field(labels, "data_source")
    sources = field(tensors, "data_source") if sources is None else sources
    is_jagged = isinstance(routes, Jagged | list) or getattr(routes, "is_nested", False)
    yield from (_jagged_rows if is_jagged else _rows)(tensors, routes, step, sources)


def _rows(tensors: Any, routes: Any, step: int, sources: Any) -> Iterator[Record | Dropped]:
    _, width, *_ = shape = fields.shape_of(routes, KEY)
    mask_BT, tokens_BT = fields.masks(tensors, KEY, shape, "attention_mask", "input_ids")
    prompts, responses = (fields.optional_integers(tensors, name, 2) for name in ("prompts", "responses"))
    prompt_width = 0
    if prompts is not None:
        prompt_width = min(width, prompts.shape[1])
    elif responses is not None:
        prompt_width = max(0, width - responses.shape[1])
    fed_BT: Array = np.asarray(fields.as_array(routes).any(axis=(2, 3))) if mask_BT is None else mask_BT
    for row, (start, end, count) in enumerate(fields.spans(fed_BT)):
        if not count:
            yield from (Dropped("empty sequences"), Dropped("padding rows", width))
            continue
        # Masked tokens in the middle were not fed to the model either.
        is_whole = mask_BT is None or count == end - start
        rows = slice(start, end) if is_whole else np.flatnonzero(fed_BT[row])
        before = max(0, min(prompt_width, end) - start) if is_whole else np.count_nonzero(fed_BT[row, :prompt_width])
        yield Record(
            routes,
            f"row {row}",
            place=row,
            rows=rows,
            num_tokens=None if mask_BT is None else count,
            prompt_length=int(before),
            tokens=() if mask_BT is None or tokens_BT is None else (tokens_BT[row][rows],),
            step=step,
            domain=fields.label_of(sources, row),
        )


def _jagged_rows(tensors: Any, routes: Any, step: int, sources: Any) -> Iterator[Record]:
    parts = fields.parts_of(routes)
    found = [(name, field(tensors, name)) for name in ("input_ids", "prompts")]
    tokens, prompts = (None if value is None else fields.rows_of(value, name) for name, value in found)
    for name, rows in (("input_ids", tokens), ("prompts", prompts)):
        if rows is not None and len(rows) != len(parts):
            raise InputError(f"{name} has {len(rows)} rows; {KEY} has {len(parts)}")
    for row, (source, place, length) in enumerate(parts):
        yield Record(
            source,
            f"row {row}",
            place=place,
            placed=False,
            num_tokens=length if tokens is None else len(tokens[row]),
            prompt_length=0 if prompts is None else len(prompts[row]),
            tokens=() if tokens is None else (tokens[row],),
            step=step,
            domain=fields.label_of(sources, row),
        )


def _parts(batch: Any) -> tuple[Any, Any, Any]:
    """A batch's tensors, labels and metadata, each with readable fields."""
    if isinstance(batch, OpaqueObject):
        batch = _unwrapped(batch)
    elif not isinstance(batch, Mapping) and hasattr(batch, "non_tensor_batch"):
        batch = {"batch": batch.batch, "non_tensor_batch": batch.non_tensor_batch, "meta_info": batch.meta_info}
    if not isinstance(batch, Mapping) and not hasattr(batch, "keys"):
        raise InputError(f"a {type(batch).__name__} where a batch should be: a dictionary with {KEY!r}")
    tensors = field(batch, "batch")
    if field(batch, KEY) is not None or tensors is None:
        tensors = batch
    elif isinstance(tensors, OpaqueObject):
        tensors = _unwrapped(tensors)
    return tensors, field(batch, "non_tensor_batch"), field(batch, "meta_info")


def _unwrapped(value: OpaqueObject) -> Any:
    """A DataProto, TensorDict or dictionary of a dump as dictionaries. Raises InputError if it is none of these."""
    kind = value.name.rpartition(".")[2]
    if kind.startswith("_rebuild_tensordict_files_consolidated"):
        return _from_consolidated(*value.args[:2])
    if kind == "_make_td":
        return dict(value.args[1]["_tensordict"])
    if isinstance(value.state, dict) and "_tensordict" in value.state:
        inner = value.state["_tensordict"]
        return dict(inner.items if isinstance(inner, OpaqueObject) else inner)
    if kind in ("DataProto", "DataProtoItem"):
        if isinstance(value.state, tuple) and len(value.state) == 3:
            tensors, labels, facts = value.state
            return {"batch": _deserialised(tensors), "non_tensor_batch": labels, "meta_info": facts}
        if isinstance(value.state, dict):
            return value.state
    if value.items:
        return value.items
    raise InputError(f"holds a {kind} where a batch should be: a dictionary with {KEY!r}")


def _deserialised(tensors: Any) -> Any:
    """`DataProto.__getstate__`: bytes of a torch file or of a pickle, or the encoded fields of a TensorDict."""
    if isinstance(tensors, bytes | memoryview | LatinBytes):
        tensors = torch_files.loads(buffer_of(tensors))
    if isinstance(tensors, tuple) and len(tensors) == 3 and isinstance(tensors[2], dict):
        return {key: _decoded(value) for key, value in tensors[2].items() if isinstance(value, tuple)}
    return tensors


def _decoded(value: Any) -> Any:
    if len(value) == 2:
        return [_decoded(each) for each in value[1]]
    dtype, shape, content = value
    content = content.data if isinstance(content, NumpyArray) else content
    return NumpyArray(tuple(shape), DType(TORCH_DTYPES[dtype].str), content)


def _from_consolidated(metadata: Any, storage: Any) -> dict[str, Any]:
    """`tensordict/_reductions.py`: every leaf is a range of bytes of one storage."""
    content: memoryview = fields.as_array(storage, "the storage of a TensorDict").view("u1").reshape(-1).data
    found: dict[str, Any] = {}
    for key, leaf in metadata["leaves"].items():
        # dtype, shape, (device,) start, stop, (padding); the fields between depend on the version.
        shape = next((each for each in leaf if isinstance(each, list | tuple)), ())
        start, stop, *_ = (each for each in leaf if type(each) is int)
        dtype = str(leaf[0]).removeprefix("torch.")
        if not 0 <= start <= stop <= len(content):
            raise InputError(f"a damaged TensorDict: {key[:80]!r} lies outside its storage")
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        part = content[start:stop]
        found[key] = Tensor(Storage(dtype, 0, lambda part=part: part), dtype, 0, tuple(shape), strides)  # type: ignore[misc]
    for key in [key for key in found if key.startswith("<NJT_VALUES>")]:
        name = key.removeprefix("<NJT_VALUES>")
        offsets, lengths = found.get(f"<NJT_OFFSETS>{name}"), found.get(f"<NJT_LENGTHS>{name}")
        if offsets is not None:
            found[name] = Jagged(found[key], offsets, lengths)
    for key, value in metadata["non_tensors"].items():
        found.setdefault(key, value[0] if isinstance(value, tuple) else value)
    return found
