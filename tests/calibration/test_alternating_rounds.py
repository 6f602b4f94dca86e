"""Order and number of repeated measurements, and the interval of their median."""

from __future__ import annotations

import statistics
from functools import partial

import numpy as np
import pytest

from trimtab.calibration.alternating_rounds import WARM_UP_ROUNDS, alternate, median_with_interval, medians


def test_variants_alternate_in_a_rotating_order_after_a_warm_up() -> None:
    calls: list[str] = []

    def call(name: str) -> int:
        calls.append(name)
        return len(calls)

    results = alternate({name: partial(call, name) for name in "abc"}, 2, warm_up=1)
    assert "".join(calls) == "abc" + "bca" + "cab"
    assert results == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}


def test_medians_are_taken_per_figure() -> None:
    warm_up = [{"s": 9.0, "bytes": 9.0}] * WARM_UP_ROUNDS
    figures = iter([*warm_up, {"s": 3.0, "bytes": 1.0}, {"s": 1.0, "bytes": 1.0}, {"s": 2.0, "bytes": 7.0}])
    assert medians({"a": partial(next, figures)}, 3) == {"a": {"s": 2.0, "bytes": 1.0}}


def test_the_interval_covers_the_median_in_95_of_100_cases() -> None:
    """41 values around 3; 200 cases, so 5% are 10 and at most 22 nearly always."""
    rng = np.random.default_rng(0)
    missed = 0
    for case in range(200):
        values = rng.normal(3, 1, 41).tolist()
        median, (low, high) = median_with_interval(values, seed=case)
        assert low < median == statistics.median(values) < high
        missed += not low <= 3 <= high
    assert 1 <= missed <= 22
    assert median_with_interval([2.0, 2.0])[1] == pytest.approx([2.0, 2.0])
