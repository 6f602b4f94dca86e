"""Decoding of the routes in a response, and detection of rows without a route."""

from __future__ import annotations

import binascii
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers.tensors import NPY_MAGIC, array_of_npy
from trimtab.trace.formats.dump_fields import array_of_lists
from trimtab.trace.formats.records import ImportOptions
from trimtab.trace.message_text import reason, short

ROUTES = "routed_experts"
_RAW_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
# With a shape but no dtype, the size of a number gives the dtype. Signed, so -1 stays -1.
_DTYPE_OF_SIZE = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def decode_routes(value: Any, options: ImportOptions, dtype: str = "int32") -> Array:
    """Decodes ids `[t, layers, K]` of a response.

    Args:
        value: base64 of `.npy` bytes (vLLM); base64 of raw numbers (SGLang), whose shape comes from `options`;
            `{"data": base64, "shape": [t, layers, K], "dtype": ...}`; nested lists (vLLM 0.21); or an array.
        options: for raw numbers, number of layers and top_k.
        dtype: of raw numbers.

    Raises:
        InputError: if it is none of these formats, or sizes don't fit.
    """
    if isinstance(value, str):
        data = _decoded(value)
        ids = array_of_npy(data, ROUTES) if data.startswith(NPY_MAGIC) else shape_flat(_raw(data, dtype), options)
    elif isinstance(value, Mapping):
        ids = _array_of_mapping(value, dtype)
    elif isinstance(value, list | tuple):
        ids = array_of_lists(value, 3)
    else:
        ids = _plain_array(value)
    if ids.ndim != 3 or 0 in ids.shape[1:]:
        raise InputError(f"routed_experts has shape {list(ids.shape)}; it should be [tokens, layers, top_k]")
    return check_ids(ids)


def check_ids(ids: Array) -> Array:
    """The ids, in this machine's byte order. Raises InputError unless they are integers."""
    if ids.dtype.kind not in "iu":
        raise InputError(f"ids are {ids.dtype}; they should be integers")
    return ids if ids.dtype.isnative else ids.astype(ids.dtype.newbyteorder("="))


def missing_id(ids: Array) -> int | None:
    """The value of all K ids without a route, for frameworks that pre-fill their buffers; see `Record.missing`.

    -1 if it occurs. Else 0, except for top-1, where 0 is an expert.
    """
    if ids.dtype.kind == "i" and ids.size and int(ids.min()) < 0:
        return -1
    return 0 if ids.shape[-1] > 1 else None


def between_padding(ids: Array) -> slice:
    """The rows of ids `[t, L, K]` without those at both ends that are all 0 or all -1.

    With one layer and top-1 zeros stay: they may be routes.
    """
    flat = ids.reshape(len(ids), -1)
    padded = (flat == -1).all(axis=1) if ids.dtype.kind == "i" else np.zeros(len(ids), bool)
    if flat.shape[1] > 1:
        padded |= ~flat.any(axis=1)
    kept = np.flatnonzero(~padded)
    return slice(kept[0], kept[-1] + 1) if len(kept) else slice(0, 0)


def lengths_of_starts(starts: Array, total: int) -> Array:
    """`[S]` tokens of each sequence, from the first token of each and the end `[S + 1]`.

    Raises:
        InputError: if the starts are not ascending from 0 to `total`.
    """
    starts = starts.astype(np.int64)
    if len(starts) < 1 or starts[0] != 0 or starts[-1] != total or (np.diff(starts) < 0).any():
        raise InputError(f"sequence_starts should be ascending from 0 to the number of tokens, {total}")
    return np.diff(starts)


def raw_dtype(name: Any) -> str:
    """The declared dtype. Raises InputError if it is not a dtype of ids."""
    if not isinstance(name, str) or name.strip().lower() not in _RAW_DTYPES:
        raise InputError(f"routed_experts_dtype is {short(name)}; it should be one of {', '.join(_RAW_DTYPES)}")
    return name.strip().lower()


def shape_flat(flat: Array, options: ImportOptions, what: str = "routed_experts") -> Array:
    """`[t, layers, K]` of ids one after another, with the caller's numbers of layers and top_k.

    Raises:
        InputError: if one is unknown, or they don't divide the number of ids.
    """
    layers, top_k = options.num_layers, options.top_k
    if not layers or not top_k:
        missing = " and ".join(name for name, value in (("--num-layers", layers), ("--top-k", top_k)) if not value)
        raise InputError(f"{what} has no shape; give {missing}, or --model with a config.json or a model's name")
    if flat.size % (layers * top_k):
        raise InputError(
            f"{what} holds {flat.size} ids of {flat.dtype}, which {layers} layers x top-{top_k} don't divide"
        )
    return flat.reshape(-1, layers, top_k)


def _decoded(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise InputError(f"routed_experts is not valid base64 ({reason(error)})") from None


def _raw(data: bytes, dtype: str) -> Array:
    kind = np.dtype(dtype).newbyteorder("<")
    if len(data) % kind.itemsize:
        raise InputError(f"routed_experts has {len(data)} bytes, which is no whole number of {dtype}")
    return np.frombuffer(data, kind)


def _array_of_mapping(value: Mapping[str, Any], default: str) -> Array:
    data, shape, dtype = value.get("data"), value.get("shape"), value.get("dtype")
    if not isinstance(data, str):
        raise InputError("routed_experts has no base64 'data'")
    content = _decoded(data)
    if content.startswith(NPY_MAGIC):
        return array_of_npy(content, ROUTES)
    if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
        raise InputError("routed_experts has no 'shape' [tokens, layers, top_k]")
    count = math.prod(shape)
    if dtype is None:
        dtype = np.dtype(_DTYPE_OF_SIZE.get(len(content) // count, default)).name if count else default
    flat = _raw(content, raw_dtype(dtype))
    if len(flat) != count:
        raise InputError(f"routed_experts claims shape {short(shape)} of {dtype}; there are {len(content)} bytes")
    return flat.reshape(shape)


def _plain_array(value: Any) -> Array:
    """An array or tensor on the CPU."""
    if isinstance(value, bytes | bytearray):
        return array_of_npy(bytes(value), ROUTES)
    try:
        array = np.asarray(value)
    except Exception as error:  # whatever a tensor of another library raises
        raise InputError(f"routed_experts is a {type(value).__name__}, not an array ({reason(error)})") from None
    return array
