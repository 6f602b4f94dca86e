"""Arrays from `.npy` bytes, base64 and nested lists.

Nothing is unpickled.
"""

from __future__ import annotations

import binascii
import io
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, BinaryIO

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.message_text import kind_of, reason, short

NPY_MAGIC = b"\x93NUMPY"


def decode_base64(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise InputError(f"routed_experts is not valid base64 ({reason(error)})") from None


def npy_header(file: BinaryIO, what: str) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    """As `read_npy_header`, but shape and dtype are not checked."""
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(file)
    except Exception as error:  # for a hostile header numpy's parser raises any exception of Python's parser
        raise InputError(f"{what} has no valid .npy header ({reason(error)})") from None
    return shape, dtype, bool(fortran)


def read_npy_header(file: BinaryIO, size: int, what: str = "the array") -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    """Shape, dtype and whether the first axis runs fastest, of `.npy` bytes; `file` is then at the data.

    Args:
        size: number of bytes, header included.

    Raises:
        InputError: if it is not a `.npy` header, has dtype object, or does not match the number of bytes.
    """
    shape, dtype, fortran = npy_header(file, what)
    there = size - file.tell()
    if dtype.hasobject or dtype.kind not in "iufbU" or not dtype.itemsize:
        raise InputError(f"{what} holds {str(dtype)[:40]}; only plain numbers are read")
    if any(length < 0 for length in shape) or math.prod(shape) * dtype.itemsize != there:
        raise InputError(f"{what} claims shape {short(shape)} of {dtype}; there are {there} bytes of data")
    return shape, dtype, fortran


def array_of_npy(data: bytes, what: str = "routed_experts") -> Array:
    """The array in `.npy` bytes, a view of the same memory."""
    file = io.BytesIO(data)
    shape, dtype, fortran = read_npy_header(file, len(data), what)
    flat = np.frombuffer(data, dtype, offset=file.tell()) if math.prod(shape) else np.empty(0, dtype)
    try:
        return flat.reshape(shape, order="F" if fortran else "C")
    except ValueError:  # nothing, of more than 64 bits of rows
        raise InputError(f"{what} claims shape {short(shape)}") from None


def array_of_lists(value: Sequence[Any], depth: int, what: str = "ids", *, scalars: bool = False) -> Array:
    """An integer array from lists `depth` deep, in the narrowest dtype.

    Args:
        scalars: whether booleans, and numbers of numpy and torch, are integers too.

    Raises:
        InputError: if the lists are ragged or contain anything but integers of 64 bits.
    """
    shape = [len(value)]
    flat: Sequence[Any] = value
    for _ in range(depth - 1):
        if not all(isinstance(part, list | tuple) for part in flat):
            raise InputError(f"{what} should be lists {depth} deep")
        lengths = set(map(len, flat))
        if len(lengths) > 1:
            raise InputError(f"lists of {what} have different lengths, {min(lengths)} and {max(lengths)}")
        shape.append(lengths.pop() if lengths else 0)
        flat = list(chain.from_iterable(flat))
    if scalars and set(map(type, flat)) != {int}:
        flat = [each.item() if hasattr(each, "item") else each for each in flat]
        flat = [int(each) if type(each) is bool else each for each in flat]
    if set(map(type, flat)) - {int}:
        kind = kind_of(next(each for each in flat if type(each) is not int))
        raise InputError(f"{what} should be whole numbers; there is {kind}")
    try:
        ids = np.array(flat, np.int64)
    except OverflowError:
        raise InputError(f"{what} hold {short(max(flat, key=abs))}; that is no expert") from None
    low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
    narrow = next((t for t in (np.int16, np.int32) if np.iinfo(t).min <= low and high <= np.iinfo(t).max), np.int64)
    return ids.astype(narrow).reshape(shape)
