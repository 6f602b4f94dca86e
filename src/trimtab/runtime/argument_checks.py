"""Checks of a session's arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trimtab.errors import InputError


def at_least(name: str, value: int, least: int) -> int:
    """The value. Raises InputError if it is not an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} is {value!r}; it should be a whole number of {least} or more")
    return value


def finite(name: str, value: float) -> float:
    """The value. Raises InputError if it is not a finite number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{name} is {value!r}; it should be a finite number")
    return value


def one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    """The value. Raises InputError if it is not an allowed one."""
    if value not in allowed:
        raise InputError(f"{name} is {value!r}; it should be one of {', '.join(allowed)}")
    return value
