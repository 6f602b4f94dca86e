"""`Borrowed`: arrays of a framework, read later by another thread without keeping much of their memory alive."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from trimtab.array_type import Array

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

    Args:
        value: an array, a tensor, a text, or lists and dictionaries of these.

    Attributes:
        can_be_weak: False if there was no room, and the value is of a kind that can't be referenced weakly.
    """

    def __init__(self, value: Any, room: Room) -> None:
        self._room = room
        self._kept = size_of(value)
        self._get: Callable[[], Any] = lambda: value
        self.can_be_weak = True
        if not room.take(self._kept):
            self._kept = 0
            try:
                self._get = weakref.ref(value)
            except TypeError:
                # Text, lists and dictionaries.
                self._get = lambda: None
                self.can_be_weak = False

    def get(self) -> Any:
        """The object; None if its owner has freed it."""
        return self._get()

    def __del__(self) -> None:
        self._room.give_back(self._kept)


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


def fingerprint(ids: Array) -> bytes:
    """The ids of a few tokens of `[t, ...]` in the first layer, to see whether an array was written to meanwhile."""
    step = max(1, len(ids) // COMPARED_TOKENS)
    return ids[::step].reshape(-1, *ids.shape[1:])[:, 0].tobytes() if ids.ndim > 1 else ids[::step].tobytes()
