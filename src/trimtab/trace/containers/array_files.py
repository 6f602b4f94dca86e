"""Reader of `.npy`, `.npz` and safetensors files, whose arrays stay in the file until rows of them are read."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers import torch_files
from trimtab.trace.containers.archives import ZIP_MAGIC
from trimtab.trace.containers.tensors import NPY_MAGIC, NumpyArray, plain_numbers
from trimtab.trace.message_text import reason

SAFETENSORS_DTYPES: dict[str, np.dtype[Any]] = {
    f"{kind.upper()}{8 * size}": np.dtype(f"<{kind}{size}") for kind in "ui" for size in (1, 2, 4, 8)
}


@dataclass(frozen=True)
class Arrays:
    """The arrays of a file by name; that of an `.npy` file has the name "".

    Attributes:
        texts: a safetensors file's metadata.
    """

    arrays: Mapping[str, Any]
    texts: dict[str, str] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array, () if it is missing."""
        if name not in self.arrays:
            return ()
        array = self.arrays[name]
        return tuple(array.shape if isinstance(array, np.ndarray) else array.get_shape())

    def rows(self, name: str, start: int, end: int) -> Array:
        """Rows `start` to `end - 1` of an array."""
        array, shape = self.arrays[name], self.shape(name)
        if start == end and not isinstance(array, np.ndarray):
            # safetensors has no empty slices.
            return np.empty((0, *shape[1:]), SAFETENSORS_DTYPES[array.get_dtype()])
        rows: Array = array[start:end]
        return rows

    def values(self, name: str, kinds: str = "iuU") -> Array:
        """A whole array of integers or texts `[N]`.

        Args:
            kinds: of dtypes that are allowed.

        Raises:
            InputError: if it has another shape or dtype.
        """
        shape = self.shape(name)
        if len(shape) != 1:
            raise InputError(f"{name} has shape {list(shape)}; it should be a row of values")
        values = self.rows(name, 0, *shape)
        if values.dtype.kind not in kinds:
            raise InputError(f"{name} is {values.dtype}; it should be whole numbers")
        if values.dtype.kind == "U" and values.nbytes:
            letters = np.ascontiguousarray(values).view(values.dtype.byteorder + "u4")
            # Values outside Unicode are not text in Python, and lone surrogates can't be printed.
            if letters.max() > 0x10FFFF or ((letters >= 0xD800) & (letters < 0xE000)).any():
                raise InputError(f"{name} holds what is no Unicode text")
        return values

    def numbers(self, name: str, count: int, limit: int = 1 << 31) -> Array:
        """`[count]` integers of 0 to `limit - 1`, one a sequence; zeros if the array is missing.

        Raises:
            InputError: if there are others, or more or fewer.
        """
        if name not in self:
            return np.zeros(count, np.int64)
        values = self.values(name, "iu")
        if len(values) != count or values.min(initial=0) < 0 or values.max(initial=0) >= limit:
            raise InputError(f"{name} should be {count} whole numbers of 0 to {limit - 1}, one a sequence")
        return values


def array_names(path: Path) -> list[str] | None:
    """Names of a file's arrays, [""] for `.npy`; None if it is not an array file. Never raises."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(NPY_MAGIC))
        if magic == NPY_MAGIC:
            return [""]
        if magic.startswith(ZIP_MAGIC):
            with zipfile.ZipFile(path) as archive:
                return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")] or None
        return list(_tensors(path).arrays)
    except Exception:  # only a test; errors are reported when the file is read
        return None


@contextmanager
def open_arrays(path: Path) -> Iterator[Arrays]:
    """The arrays of a file. Raises InputError here or while reading, if the file is damaged."""
    try:
        if torch_files.looks_loadable(path):
            found = torch_files.load(path)
            yield Arrays(_plain(found if isinstance(found, dict) else {"": found}))
        else:
            yield _tensors(path)
    except (KeyError, SafetensorError) as error:
        raise InputError(f"can't be read ({reason(error)})") from None


def _plain(found: Mapping[str, Any]) -> dict[str, Array]:
    arrays = {}
    for name, array in found.items():
        if not isinstance(array, NumpyArray):
            raise InputError("no array file: neither .npy, .npz nor safetensors")
        arrays[name] = plain_numbers(array, name or "the array")
    return arrays


def _tensors(path: Path) -> Arrays:
    """The tensors of a safetensors file."""
    try:
        file = safe_open(path, "numpy")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"no array file: neither .npy, .npz nor safetensors ({reason(error)})") from None
    # Others, such as bfloat16, are of no use here.
    known = {name: part for name, part in slices.items() if part.get_dtype() in SAFETENSORS_DTYPES}
    return Arrays(known, file.metadata() or {})
