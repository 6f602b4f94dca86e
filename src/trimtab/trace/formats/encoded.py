"""Ids out of what carries them: `.npy` bytes, base64, raw numbers, nested lists.

What a header claims is compared with the bytes that are there before anything is allocated, and nothing is unpickled.
"""

from __future__ import annotations

import binascii
import io
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, BinaryIO

import numpy as np

from trimtab.errors import InputError
from trimtab.trace.formats.json_values import kind_of, reason
from trimtab.trace.formats.records import Known
from trimtab.trace.routing import Array

NPY_MAGIC = b"\x93NUMPY"
_RAW_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
# Where a sender gives a shape but no dtype, the size of a number tells. Signed, so that -1 stays -1.
_DTYPE_OF_SIZE = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def decode_routes(value: Any, known: Known, dtype: str = "int32") -> Array:
    """Ids `[t, layers, K]` as a response carries them.

    Args:
        value: base64 of `.npy` bytes (vLLM); base64 of raw numbers (SGLang), whose shape comes from `known`;
            `{"data": base64, "shape": [t, layers, K], "dtype": ...}`; nested lists (vLLM 0.21); or an array.
        known: for raw numbers, how many layers and top_k.
        dtype: of raw numbers.

    Raises:
        InputError: if it is none of these, or sizes don't fit.
    """
    if isinstance(value, str):
        data = decode_base64(value)
        ids = array_of_npy(data) if data.startswith(NPY_MAGIC) else _shape_raw(data, known, dtype)
    elif isinstance(value, Mapping):
        ids = _array_of_mapping(value, dtype)
    elif isinstance(value, list | tuple):
        ids = array_of_lists(value, 3)
    else:
        ids = _plain_array(value)
    if ids.ndim != 3 or 0 in ids.shape[1:]:
        raise InputError(f"routed_experts has shape {list(ids.shape)}; it should be [tokens, layers, top_k]")
    return check_ids(ids)


def decode_base64(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise InputError(f"routed_experts is not valid base64 ({reason(error)})") from None


def read_npy_header(file: BinaryIO, size: int, what: str = "the array") -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    """Shape, dtype and whether the first axis runs fastest, of `.npy` bytes whose numbers come next in `file`.

    Args:
        size: all bytes that there are, header included.

    Raises:
        InputError: if it is no `.npy` header, of objects, or of a size that isn't that of the bytes.
    """
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(file)
    except Exception as error:  # numpy's parser of a hostile header raises whatever Python's own does
        raise InputError(f"{what} has no valid .npy header ({reason(error)})") from None
    there = size - file.tell()
    if dtype.hasobject or dtype.kind not in "iufbU" or not dtype.itemsize:
        raise InputError(f"{what} holds {str(dtype)[:40]}; only plain numbers are read")
    if any(length < 0 for length in shape) or math.prod(shape) * dtype.itemsize != there:
        raise InputError(f"{what} claims shape {_short(shape)} of {dtype}; there are {there} bytes of data")
    return shape, dtype, bool(fortran)


def array_of_npy(data: bytes, what: str = "routed_experts") -> Array:
    """The array that `.npy` bytes hold, over the same memory."""
    file = io.BytesIO(data)
    shape, dtype, fortran = read_npy_header(file, len(data), what)
    flat = np.frombuffer(data, dtype, offset=file.tell()) if math.prod(shape) else np.empty(0, dtype)
    try:
        return flat.reshape(shape, order="F" if fortran else "C")
    except ValueError:  # nothing, of more than 64 bits of rows
        raise InputError(f"{what} claims shape {_short(shape)}") from None


def array_of_lists(value: Sequence[Any], depth: int) -> Array:
    """An integer array out of lists `depth` deep, in the narrowest type.

    Raises:
        InputError: if the lists are ragged, or hold anything but whole numbers that fit 64 bits.
    """
    shape = [len(value)]
    flat: Sequence[Any] = value
    for _ in range(depth - 1):
        if not all(isinstance(part, list | tuple) for part in flat):
            raise InputError(f"ids should be lists {depth} deep")
        lengths = set(map(len, flat))
        if len(lengths) > 1:
            raise InputError(f"lists of ids have different lengths, {min(lengths)} and {max(lengths)}")
        shape.append(lengths.pop() if lengths else 0)
        flat = list(chain.from_iterable(flat))
    wrong = set(map(type, flat)) - {int}
    if wrong:
        raise InputError(
            f"ids should be whole numbers; there is {kind_of(next(each for each in flat if type(each) is not int))}"
        )
    try:
        ids = np.array(flat, np.int64)
    except OverflowError:
        raise InputError(f"an id is {_short(max(flat, key=abs))}; that is no expert") from None
    low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
    narrow = next((t for t in (np.int16, np.int32) if np.iinfo(t).min <= low and high <= np.iinfo(t).max), np.int64)
    return ids.astype(narrow).reshape(shape)


def check_ids(ids: Array) -> Array:
    """The ids, in this machine's byte order. Raises InputError unless they are integers."""
    if ids.dtype.kind not in "iu":
        raise InputError(f"ids are {ids.dtype}; they should be integers")
    return ids if ids.dtype.isnative else ids.astype(ids.dtype.newbyteorder("="))


def sign_of_gaps(ids: Array) -> int | None:
    """What all K ids are where a framework that fills its buffers beforehand has no route; see `Record.missing`.

    -1 if there is any. Else 0, but not for top-1, where a lone 0 is an expert.
    """
    if ids.dtype.kind == "i" and ids.size and int(ids.min()) < 0:
        return -1
    return 0 if ids.shape[-1] > 1 else None


def trim_padding(ids: Array) -> tuple[Array, int]:
    """Ids `[t, L, K]` without the rows at both ends that are all 0 or all -1, and how many those were.

    With one layer and top-1 zeros stay: they may be routes.
    """
    flat = ids.reshape(len(ids), -1)
    padded = (flat == -1).all(axis=1) if ids.dtype.kind == "i" else np.zeros(len(ids), bool)
    if flat.shape[1] > 1:
        padded |= ~flat.any(axis=1)
    kept = np.flatnonzero(~padded)
    first, end = (int(kept[0]), int(kept[-1]) + 1) if len(kept) else (0, 0)
    return ids[first:end], len(ids) - (end - first)


def _shape_raw(data: bytes, known: Known, dtype: str) -> Array:
    flat = _raw(data, dtype)
    if known.num_layers is None or known.top_k is None:
        option = "--num-layers" if known.num_layers is None else "--top-k"
        raise InputError(f"routed_experts has no shape; say {option}, or --model config.json")
    row = known.num_layers * known.top_k
    if row < 1 or len(flat) % row:
        raise InputError(
            f"routed_experts holds {len(flat)} ids of {dtype}, which {known.num_layers} layers x top-{known.top_k} "
            "don't divide"
        )
    return flat.reshape(-1, known.num_layers, known.top_k)


def _raw(data: bytes, dtype: str) -> Array:
    kind = np.dtype(dtype).newbyteorder("<")
    if len(data) % kind.itemsize:
        raise InputError(f"routed_experts has {len(data)} bytes, which is no whole number of {dtype}")
    return np.frombuffer(data, kind)


def _array_of_mapping(value: Mapping[str, Any], default: str) -> Array:
    data, shape, dtype = value.get("data"), value.get("shape"), value.get("dtype")
    if not isinstance(data, str):
        raise InputError("routed_experts has no base64 'data'")
    content = decode_base64(data)
    if content.startswith(NPY_MAGIC):
        return array_of_npy(content)
    if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
        raise InputError("routed_experts has no 'shape' [tokens, layers, top_k]")
    count = math.prod(shape)
    if dtype is None:
        dtype = np.dtype(_DTYPE_OF_SIZE.get(len(content) // count, default)).name if count else default
    flat = _raw(content, raw_dtype(dtype))
    if len(flat) != count:
        raise InputError(f"routed_experts claims shape {_short(shape)} of {dtype}; there are {len(content)} bytes")
    return flat.reshape(shape)


def raw_dtype(name: Any) -> str:
    """The dtype that a sender declares. Raises InputError if ids don't come in it."""
    if not isinstance(name, str) or name.strip().lower() not in _RAW_DTYPES:
        raise InputError(f"routed_experts_dtype is {_short(name)}; it should be one of {', '.join(_RAW_DTYPES)}")
    return name.strip().lower()


def _plain_array(value: Any) -> Array:
    """An array or tensor on the CPU."""
    if isinstance(value, bytes | bytearray):
        return array_of_npy(bytes(value))
    try:
        array = np.asarray(value)
    except Exception as error:  # whatever a tensor of another library raises
        raise InputError(f"routed_experts is a {type(value).__name__}, not an array ({reason(error)})") from None
    return array


def _short(value: Any) -> str:
    try:
        text = repr(list(value) if isinstance(value, tuple) else value)
    except ValueError:  # a whole number too long to print
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
