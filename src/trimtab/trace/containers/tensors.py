"""Tensors and numpy arrays of a dump, which stay in the file until `numpy()` is called.

Each describes its bytes; `numpy()` checks the description against the existing bytes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.message_text import at_place, clip, reason

NPY_MAGIC = b"\x93NUMPY"
_NUMPY_DTYPES = (
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip
# Torch's dtypes by name; those that numpy does not have, which no reader needs, as bytes.
TORCH_DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in _NUMPY_DTYPES},
    "bfloat16": np.dtype("V2"),
    **{f"float8_{kind}": np.dtype("V1") for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")},
}
STORAGES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}
_PLAIN_DTYPE = re.compile(r"[<>|=]?([?b]1?|[iu][1248]|f[248]|c(8|16)|[SU]\d{1,6}|O8?)")
_MOST_DIMENSIONS = 16


class Sealed:
    """A class of whose objects a pickle can change nothing."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise TypeError(f"state for a {type(self).__name__}")


@dataclass(slots=True, eq=False)
class LatinBytes(Sealed):
    """Bytes that protocol 2 wrote as a large string, one letter a byte."""

    text: str


def buffer_of(data: Any) -> memoryview:
    """The bytes of any value of a dump that has bytes. Raises InputError if it has none."""
    if isinstance(data, LatinBytes):
        try:
            return memoryview(data.text.encode("latin-1"))
        except UnicodeError:
            raise InputError("a damaged file: an array's bytes can't be read") from None
    if isinstance(data, bytes | bytearray | memoryview):
        return memoryview(data).toreadonly()
    raise InputError(f"a damaged file: a {type(data).__name__} where the bytes of an array should be")


@dataclass(slots=True, eq=False)
class Storage(Sealed):
    """Memory that tensors share: `count` elements of a torch dtype, or bytes; `fetch` returns what the file holds."""

    dtype: str
    count: int
    fetch: Callable[[], memoryview]
    big_endian: bool = False


@dataclass(slots=True, eq=False)
class Tensor(Sealed):
    """A torch tensor: a strided view of a storage. `offset` and `strides` count elements of `dtype`."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def numpy(self) -> Array:
        """The tensor as a read-only view of the file.

        Raises:
            InputError: if it does not fit its storage, or numpy does not have its dtype.
        """
        dtype = TORCH_DTYPES.get(self.dtype)
        if dtype is None or dtype.kind == "V":
            raise InputError(f"a tensor of dtype {clip(self.dtype)}, which is not known")
        content = self.storage.fetch()
        elements = np.frombuffer(content[: len(content) // dtype.itemsize * dtype.itemsize], dtype)
        if self.storage.big_endian:
            elements = elements.view(dtype.newbyteorder(">"))
        shape = _checked_shape(self.shape)
        size = math.prod(shape)
        if len(self.strides) != len(shape) or not all(type(each) is int and each >= 0 for each in self.strides):
            raise InputError("a damaged file: a tensor's strides don't fit its shape")
        last = self.offset + sum((n - 1) * stride for n, stride in zip(shape, self.strides, strict=True))
        if self.offset < 0 or (size and last >= len(elements)):
            raise InputError(
                f"a damaged file: a tensor of shape {list(shape)} does not fit its storage of {len(elements)} elements"
            )
        if not size:
            return np.empty(shape, elements.dtype)
        strides = tuple(stride * dtype.itemsize for stride in self.strides)
        return np.lib.stride_tricks.as_strided(elements[self.offset :], shape, strides, writeable=False)


@dataclass(slots=True, eq=False)
class Jagged(Sealed):
    """A nested tensor: row i is `values[offsets[i]:offsets[i + 1]]`, or the first `lengths[i]` of these."""

    values: Any
    offsets: Any
    lengths: Any = None

    def bounds(self) -> list[tuple[int, int]]:
        """The start and end of every row. Raises InputError if the offsets are not ascending within the values."""
        values, offsets = self.values.numpy(), self.offsets.numpy()
        if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or not len(offsets) or not values.ndim:
            raise InputError("a damaged file: a nested tensor without offsets")
        ends = offsets[1:] if self.lengths is None else offsets[:-1] + self.lengths.numpy()
        if offsets[0] < 0 or np.any(ends < offsets[:-1]) or np.any(ends > len(values)):
            raise InputError("a damaged file: the offsets of a nested tensor lie outside its values")
        return list(zip(offsets[:-1].tolist(), ends.tolist(), strict=True))


@dataclass(slots=True, eq=False)
class DType:
    """A numpy dtype, by its code: "<i2"."""

    code: str

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        if order not in ("<", ">", "|", "="):
            raise ValueError("a dtype without byte order")
        self.code = order + self.code.lstrip("<>|=")

    def numpy(self) -> np.dtype[Any]:
        if not _PLAIN_DTYPE.fullmatch(self.code):
            raise InputError(f"an array of dtype {clip(self.code)}, which is not known")
        return np.dtype(self.code)


@dataclass(slots=True, eq=False)
class NumpyArray:
    """A numpy array: shape, dtype and bytes, or the list of its objects. `order` is "C" or "F".

    Where memory is laid out in another order of axes, `shape` is that of memory and `axes` restores the order.
    """

    shape: Any = ()
    dtype: Any = None
    data: Any = b""
    order: str = "C"
    axes: tuple[int, ...] | None = None

    @classmethod
    def of_npy(cls, content: memoryview, what: str = "an array") -> NumpyArray:
        """The array in `.npy` bytes; the data of one of objects is a pickle.

        Raises:
            InputError: if it has no header of `.npy`.
        """
        file = io.BytesIO(bytes(content[: 1 << 14]))
        try:
            version = np.lib.format.read_magic(file)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
            shape, fortran, dtype = read(file)
        except Exception as error:  # for a hostile header numpy's parser raises any exception of Python's parser
            raise InputError(f"{what} has no valid .npy header ({reason(error)})") from None
        return cls(shape, DType(dtype.str), content[file.tell() :], "F" if fortran else "C")

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.dtype, fortran, self.data = state
        self.order = "F" if fortran else "C"

    def numpy(self) -> Array:
        """The array; a view of the file if its bytes are stored directly.

        Raises:
            InputError: if shape, dtype and bytes do not fit together.
        """
        if not isinstance(self.dtype, DType):
            raise InputError("a damaged file: an array without dtype")
        dtype = self.dtype.numpy()
        shape = _checked_shape(self.shape)
        size = math.prod(shape)
        if dtype.hasobject:
            if not isinstance(self.data, list) or len(self.data) != size:
                raise InputError(f"a damaged file: an array of shape {list(shape)} without that many objects")
            array = np.empty(size, object)
            for place, value in enumerate(self.data):
                array[place] = value
        else:
            content = buffer_of(self.data)
            if len(content) != size * dtype.itemsize:
                raise InputError(
                    f"a damaged file: an array claims shape {list(shape)} of {dtype}; there are {len(content)} bytes"
                )
            array = np.frombuffer(content, dtype) if size else np.empty(0, dtype)
        array = array.reshape(shape, order="F" if self.order == "F" else "C")
        return array if self.axes is None else array.transpose(self.axes)


def array_of_npy(data: bytes, what: str) -> Array:
    """The array in `.npy` bytes, a view of the same memory.

    Args:
        what: its name in messages.

    Raises:
        InputError: if it is not that, or holds objects.
    """
    return plain_numbers(NumpyArray.of_npy(memoryview(data), what), what)


def plain_numbers(array: NumpyArray, what: str) -> Array:
    """An array of a dump as numpy's. Raises InputError, which begins with its name, if it holds objects."""
    with at_place(what):
        if isinstance(array.dtype, DType) and "O" in array.dtype.code:
            raise InputError(
                "it holds objects; only plain numbers are read: numpy.savez(file, *arrays) writes one array for each "
                "sequence as .npz"
            )
        return array.numpy()


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if (
        type(shape) is not tuple
        or len(shape) > _MOST_DIMENSIONS
        or not all(type(length) is int and 0 <= length < 1 << 48 for length in shape)
        or math.prod(max(length, 1) for length in shape) >= 1 << 60
    ):
        raise InputError("a damaged file: an array whose shape is none")
    return shape
