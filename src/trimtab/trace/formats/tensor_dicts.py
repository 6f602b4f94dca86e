"""Batches that were pickled as `DataProto` (verl) or `TensorDict`, as dictionaries of tensors."""

from __future__ import annotations

import math
from typing import Any

from trimtab.errors import InputError
from trimtab.trace.containers import torch_files
from trimtab.trace.containers.tensors import (
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
from trimtab.trace.formats.dump_fields import as_array


def unwrap(value: OpaqueObject, key: str) -> Any:
    """A DataProto, TensorDict or dictionary of a dump as dictionaries.

    Args:
        key: what a batch should hold, for the message.

    Raises:
        InputError: if it is none of these.
    """
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
    raise InputError(f"holds a {kind} where a batch should be: a dictionary with {key!r}")


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
    content: memoryview = as_array(storage, "the storage of a TensorDict").view("u1").reshape(-1).data
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
