"""How many examples tests run: few for each change; many with `TRIMTAB_TESTS=long`, which `make test-long` sets.

Tests that use this are marked `longer`.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

_FORM = os.environ.get("TRIMTAB_TESTS", "short")
if _FORM not in ("short", "long"):
    raise ValueError(f"TRIMTAB_TESTS is {_FORM!r}; it should be short or long")


def examples(*, short: T, long: T) -> T:
    """The number of examples, or the examples, of the form that runs."""
    return long if _FORM == "long" else short
