"""Reader of `.npy`, `.npz` and safetensors files, a few rows at a time."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from safetensors import SafetensorError, safe_open

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers.archives import ZIP_ERRORS
from trimtab.trace.containers.npy import NPY_MAGIC, read_npy_header
from trimtab.trace.message_text import reason

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
        return list(_tensors(path).shapes)
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
            magic = file.read(len(NPY_MAGIC))
            file.seek(0)
            if magic == NPY_MAGIC:
                shape, dtype, fortran = read_npy_header(file, path.stat().st_size)
                order: Literal["C", "F"] = "F" if fortran else "C"
                whole = (
                    np.memmap(path, dtype, "r", file.tell(), shape, order) if 0 not in shape else np.empty(shape, dtype)
                )
                yield Arrays({"": shape}, lambda _: _one_after_another(whole))
            elif magic.startswith(b"PK"):
                with zipfile.ZipFile(file) as archive:
                    yield _zipped(archive)
            else:
                yield _tensors(path)
    except InputError:
        raise
    except (KeyError, SafetensorError, *ZIP_ERRORS) as error:
        raise InputError(f"can't be read ({reason(error)})") from None


def _one_after_another(whole: Any) -> Callable[[int], Array]:
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
            data = file.read(size)
            if len(data) != size:
                raise InputError(f"{name} is cut off")
            flat = np.frombuffer(data, dtype) if size else np.empty(0, dtype)
            return flat.reshape(count, *shape[1:])

        return take

    names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    return Arrays({name: shape_of(name) for name in names}, rows)


def _tensors(path: Path) -> Arrays:
    """The tensors of a safetensors file."""
    try:
        file = safe_open(path, "numpy")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"no array file: neither .npy, .npz nor safetensors ({reason(error)})") from None
    # Others, such as bfloat16, are of no use here.
    known = {name: part for name, part in slices.items() if part.get_dtype() in SAFETENSORS_DTYPES}
    shapes = {name: tuple(part.get_shape()) for name, part in known.items()}

    def rows(name: str) -> Callable[[int], Array]:
        nothing = np.empty((0, *shapes[name][1:]), SAFETENSORS_DTYPES[known[name].get_dtype()])
        take = _one_after_another(known[name])
        # safetensors has no empty slices.
        return lambda count: take(count) if count else nothing

    return Arrays(shapes, rows, file.metadata() or {})
