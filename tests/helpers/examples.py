"""How many examples tests run: few for each change; many with `TRIMTAB_TESTS=long`, which `make test-long` sets.

Tests that use `examples` are marked `longer`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

_FORM = os.environ.get("TRIMTAB_TESTS", "short")
if _FORM not in ("short", "long"):
    raise ValueError(f"TRIMTAB_TESTS is {_FORM!r}; it should be short or long")


def examples(*, short: T, long: T) -> T:
    """The number of examples, or the examples, of the form that runs."""
    return long if _FORM == "long" else short


def nightly_except(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Cases of a test, all but the kept ones marked `nightly`. Tuples are values of several parameters."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[] if case in kept else [pytest.mark.nightly]
        )
        for case in cases
    ]
