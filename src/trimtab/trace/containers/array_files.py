"""Safe reader of untrusted `.npy`, `.npz` and safetensors files, a few rows at a time."""

from __future__ import annotations

import json
import math
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers.archives import ZIP_ERRORS
from trimtab.trace.containers.npy import NPY_MAGIC, read_npy_header
from trimtab.trace.message_text import reason

# Limit of rows read at once, and of arrays of sequence facts. Only a zipped array can claim more than its file.
_MOST_BYTES = 1 << 30
# Shape, dtype and offset in the file.
_Place = tuple[tuple[int, ...], np.dtype[Any], int]
_LARGEST_HEADER = 100 << 20
SAFETENSORS_DTYPES: dict[str, np.dtype[Any]] = {
    f"{kind.upper()}{8 * size}": np.dtype(f"<{kind}{size}") for kind in "ui" for size in (1, 2, 4, 8)
}


@dataclass(frozen=True)
class Arrays:
    """The arrays of a file by name; that of an `.npy` file has the name "".

    Attributes:
        shapes: of every array.
        rows: for a name, a function that returns the next rows as an array, from the first row on.
        texts: a safetensors file's metadata.
    """

    shapes: dict[str, tuple[int, ...]]
    rows: Callable[[str], Callable[[int], Array]]
    texts: dict[str, str] = field(default_factory=dict)

    def integers(self, name: str) -> Array:
        """A whole array of integers `[N]`.

        Raises:
            InputError: if it has another shape or dtype.
        """
        values = self.values(name)
        if values.dtype.kind == "U":
            raise InputError(f"{name} should be whole numbers")
        return values

    def values(self, name: str) -> Array:
        """A whole array of integers or texts `[N]`.

        Raises:
            InputError: if it has another shape or dtype.
        """
        shape = self.shapes[name]
        if len(shape) != 1:
            raise InputError(f"{name} has shape {list(shape)}; it should be a row of values")
        values = self.rows(name)(shape[0])
        if values.dtype.kind not in "iuU":
            raise InputError(f"{name} is {values.dtype}; it should be whole numbers")
        if values.dtype.kind == "U" and values.nbytes:
            letters = np.ascontiguousarray(values).view(values.dtype.byteorder + "u4")
            # Values outside Unicode are not text in Python, and lone surrogates can't be printed.
            if letters.max() > 0x10FFFF or ((letters >= 0xD800) & (letters < 0xE000)).any():
                raise InputError(f"{name} holds what is no Unicode text")
        return values


def array_names(path: Path) -> list[str] | None:
    """Names of a file's arrays, [""] for `.npy`; None if it is not an array file. Never raises."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(NPY_MAGIC))
        if magic == NPY_MAGIC:
            return [""]
        if magic.startswith(b"PK"):
            with zipfile.ZipFile(path) as archive:
                names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
            return names or None
        with path.open("rb") as file:
            return list(_safetensors_header(file, path.stat().st_size)[0])
    except Exception:  # only a test; errors are reported when the file is read
        return None


@contextmanager
def open_arrays(path: Path) -> Iterator[Arrays]:
    """The arrays of a file.

    Raises:
        InputError: here or while reading, if the file is damaged.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            magic = file.read(len(NPY_MAGIC))
            file.seek(0)
            if magic == NPY_MAGIC:
                shape, dtype, fortran = read_npy_header(file, size)
                yield _mapped(path, {"": (shape, dtype, file.tell())}, {}, fortran)
            elif magic.startswith(b"PK"):
                with zipfile.ZipFile(file) as archive:
                    yield _zipped(archive)
            else:
                yield _mapped(path, *_safetensors_header(file, size))
    except InputError:
        raise
    except (KeyError, *ZIP_ERRORS) as error:
        raise InputError(f"can't be read ({reason(error)})") from None


def _mapped(path: Path, places: dict[str, _Place], texts: dict[str, str], fortran: bool = False) -> Arrays:
    def rows(name: str) -> Callable[[int], Array]:
        shape, dtype, offset = places[name]
        if not math.prod(shape):
            whole: Array = np.empty(shape, dtype)
        else:
            whole = np.memmap(path, dtype, "r", offset, shape, "F" if fortran else "C")
        return _one_after_another(whole)

    return Arrays({name: place[0] for name, place in places.items()}, rows, texts)


def _one_after_another(whole: Array) -> Callable[[int], Array]:
    at = 0

    def take(count: int) -> Array:
        nonlocal at
        at += count
        return np.ascontiguousarray(whole[at - count : at])

    return take


def _zipped(archive: zipfile.ZipFile) -> Arrays:
    def start(name: str) -> tuple[BinaryIO, tuple[int, ...], np.dtype[Any]]:
        info = archive.getinfo(f"{name}.npy")
        file = archive.open(info)
        shape, dtype, fortran = read_npy_header(file, info.file_size, name)  # type: ignore[arg-type]
        if fortran and len(shape) > 1:
            raise InputError(f"{name} is in Fortran order; save np.ascontiguousarray of it")
        return file, shape, dtype  # type: ignore[return-value]

    def shape_of(name: str) -> tuple[int, ...]:
        file, shape, _ = start(name)
        file.close()
        return shape

    def rows(name: str) -> Callable[[int], Array]:
        file, shape, dtype = start(name)
        row_bytes = math.prod(shape[1:]) * dtype.itemsize

        def take(count: int) -> Array:
            size = count * row_bytes
            if size > _MOST_BYTES:
                raise InputError(f"{name} claims {size} bytes in one piece; up to {_MOST_BYTES} are read")
            data = file.read(size)
            if len(data) != size:
                raise InputError(f"{name} is cut off")
            flat = np.frombuffer(data, dtype) if size else np.empty(0, dtype)
            return flat.reshape(count, *shape[1:])

        return take

    names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    return Arrays({name: shape_of(name) for name in names}, rows)


def _safetensors_header(file: BinaryIO, size: int) -> tuple[dict[str, _Place], dict[str, str]]:
    """Every tensor's place, and the metadata."""
    length_bytes = file.read(8)
    (length,) = struct.unpack("<Q", length_bytes) if len(length_bytes) == 8 else (0,)
    if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
        raise InputError("no array file: neither .npy, .npz nor safetensors")
    try:
        header = json.loads(file.read(length))
        texts = header.pop("__metadata__", {})
        tensors: dict[str, _Place] = {}
        for name, entry in header.items():
            shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
            dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
            if dtype is None:
                continue  # of no use here
            whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
            if not whole or end > size - 8 - length or end - begin != math.prod(shape) * dtype.itemsize:
                raise InputError(f"{name[:40]} claims bytes that don't fit its shape or the file")
            tensors[name] = (shape, dtype, 8 + length + begin)
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            raise TypeError
    except InputError:
        raise
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        raise InputError("no valid safetensors header") from None
    return tensors, texts
