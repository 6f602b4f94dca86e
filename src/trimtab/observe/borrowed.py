"""`Sample`s of arrays of a framework, read later by another thread without keeping much of their memory alive."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.trace.formats.records import Dropped, Record

# Tokens of an array that are compared before and after reading.
COMPARED_TOKENS = 8


class Room:
    """Bytes that borrowed objects may keep alive, all together.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self._free = size
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """Whether there is room for so many bytes, which are taken then."""
        with self._lock:
            if size > self._free:
                return False
            self._free -= size
            return True

    def give_back(self, size: int) -> None:
        """Free bytes that were taken."""
        with self._lock:
            self._free += size


class Borrowed:
    """A reference to an object: it is kept alive while there is room, and else only as long as its owner keeps it.

    Of an array in a file's memory a copy is kept, or nothing: reading it after the file was cut would end the process.

    Args:
        value: an array, a tensor, a text, or lists and dictionaries of these.

    Attributes:
        can_be_weak: False if there was no room, and the value is of a kind that can't be referenced weakly.
    """

    def __init__(self, value: Any, room: Room) -> None:
        self._room = room
        is_mapped = _is_mapped(value)
        self._kept = value.nbytes if is_mapped else size_of(value)
        self.can_be_weak = True
        self._get: Callable[[], Any] = lambda: None
        if room.take(self._kept):
            held = _copy(value) if is_mapped else value
            self._get = lambda: held
            return
        self._kept = 0
        if is_mapped:
            self.can_be_weak = False
            return
        try:
            self._get = weakref.ref(value)
        except TypeError:
            # Text, lists and dictionaries.
            self.can_be_weak = False

    def get(self) -> Any:
        """The object; None if its owner has freed it."""
        return self._get()

    def __del__(self) -> None:
        self._room.give_back(self._kept)


@dataclass(frozen=True, slots=True)
class Sample:
    """A sequence, or all completions of a request.

    Attributes:
        owner: what holds the recorded ids: an array of this sample or of a whole batch, or a response.
        nbytes: of the ids, or of what they are made of.
        records: from what the owner holds to records.
        mark: `fingerprint` of the ids, padding included, when they were handed over; None if they are made of text.
    """

    owner: Borrowed
    nbytes: int
    records: Callable[[Any], Iterable[Record | Dropped]]
    mark: bytes | None = None


def size_of(value: Any) -> int:
    """Bytes that a reference to a value keeps alive; of a view, those of all that it is a view of."""
    if isinstance(value, np.ndarray):
        base = value
        while isinstance(base.base, np.ndarray):
            base = base.base
        return max(base.nbytes, value.nbytes)
    if hasattr(value, "untyped_storage"):
        return int(value.untyped_storage().nbytes())
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, dict):
        return 64 + sum(map(size_of, value.values()))
    if isinstance(value, list | tuple):
        # The first item stands for all, so that long lists are not read.
        return 64 + len(value) * (8 + (size_of(value[0]) if value else 0))
    return 32


def _is_mapped(value: Any) -> bool:
    """Whether an array or tensor is in the memory of a file. Tensors of `torch.load(mmap=True)` do not show it."""
    if hasattr(value, "untyped_storage") and not value.is_nested:
        return getattr(value.untyped_storage(), "filename", None) is not None
    while isinstance(value, np.ndarray):
        value = value.base
    return isinstance(value, mmap.mmap)


def _copy(value: Any) -> Any:
    return value.clone() if hasattr(value, "untyped_storage") else np.array(value)


def fingerprint(ids: Array) -> bytes:
    """The ids of a few tokens of `[t, ...]` in the first layer, to see whether an array was written to meanwhile."""
    step = max(1, len(ids) // COMPARED_TOKENS)
    return ids[::step, 0].tobytes() if ids.ndim > 1 else ids[::step].tobytes()
