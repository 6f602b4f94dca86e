"""Units that suit the size of a number."""

from __future__ import annotations

import math
import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.figures import plural
from trimtab.report.number_text import NONE, PREFIXES, bytes_text, flops, rate, seconds


@pytest.mark.parametrize(
    ("text", "value", "shown"),
    [
        (seconds, 0.0004, "400 µs"), (seconds, 0.04512, "45.1 ms"), (seconds, 1.6321, "1.63 s"),
        (seconds, 0.99996, "1.00 s"), (seconds, 0.00099996, "1.00 ms"), (seconds, -0.002, "-2.00 ms"),
        (bytes_text, 0, "0 B"), (bytes_text, 999, "999 B"), (bytes_text, 1_234_567, "1.23 MB"),
        (bytes_text, 999_999, "1.00 MB"), (bytes_text, 1.92e11, "192 GB"), (bytes_text, 2e12, "2.00 TB"),
        (rate, 450e9, "450 GB/s"), (rate, 6.7e12, "6.70 TB/s"), (rate, 62.5e6, "62.5 MB/s"),
        (flops, 4e14, "400 TFLOP/s"), (flops, 2.25e15, "2.25 PFLOP/s"), (flops, 5e10, "50.0 GFLOP/s"),
        (seconds, math.nan, NONE), (bytes_text, math.inf, NONE), (seconds, 0, "0.00 s"),
        (partial(seconds, span=3.0), 0.05, "0.05 s"), (partial(plural, noun="rank"), 0, "0 ranks"),
        (partial(plural, noun="rank"), 1, "1 rank"), (partial(plural, noun="rank"), 2000, "2,000 ranks"),
    ],
)  # fmt: skip
def test_the_unit_suits_the_size(text: object, value: float, shown: str) -> None:
    assert callable(text)
    assert text(value) == shown


@given(st.floats(1e3, 9e17))
def test_a_quantity_has_one_to_three_digits_before_the_point_and_loses_little(value: float) -> None:
    number, unit = bytes_text(value).split()
    assert re.fullmatch(r"\d{1,3}(\.\d+)?", number)
    factor = next(factor for factor, prefix in PREFIXES if unit == f"{prefix}B")
    assert float(number) * factor == pytest.approx(value, rel=0.006)


@given(st.floats(1e-6, 999))
def test_seconds_lose_little(value: float) -> None:
    number, unit = seconds(value).split()
    factor = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]
    assert float(number) * factor == pytest.approx(value, rel=0.006)
