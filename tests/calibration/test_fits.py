"""Rates fitted to timings: rates of synthetic machines are recovered, and noise never gives an impossible rate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.calibration.fits import GroupedTiming, fit_grouped, fit_rates, fit_ratio

RATES = st.floats(1e8, 1e15)


@settings(max_examples=50)
@given(RATES, st.floats(0.05, 20), st.floats(0, 1), st.floats(0, 0.5))
def test_two_rates_and_a_fixed_cost_are_recovered(rate: float, ratio: float, fixed: float, known: float) -> None:
    """Fixed and known seconds are fractions of the first timing's work."""
    work = np.array([[4.0, 1.0], [2.0, 0.5], [1.0, 0.25], [4.0, 4.0], [1.0, 3.0]]) * 1e9
    unit = work[0, 0] / rate
    known_P = known * unit * np.arange(5)
    seconds = work[:, 0] / rate + work[:, 1] / (rate * ratio) + fixed * unit + known_P
    fit = fit_rates(work, np.ones((5, 1)), known_P, seconds)
    assert fit.rates == pytest.approx((rate, rate * ratio), rel=1e-4)
    assert fit.fixed_s[0] == pytest.approx(fixed * unit, rel=1e-4, abs=1e-6 * unit)
    assert fit.error < 1e-6
    assert fit.note == ""


@settings(max_examples=100)
@given(st.lists(st.floats(1e-6, 10), min_size=4, max_size=4), st.lists(st.floats(0, 20), min_size=4, max_size=4))
def test_any_timings_give_rates_above_zero(seconds: list[float], known: list[float]) -> None:
    work = np.array([[8.0, 1.0], [4.0, 2.0], [2.0, 8.0], [1.0, 1.0]]) * 1e9
    fit = fit_rates(work, np.ones((4, 1)), np.array(known), np.array(seconds))
    assert all(0 < rate < math.inf for rate in fit.rates)
    assert all(0 <= cost < math.inf for cost in fit.fixed_s)


def test_work_with_a_negative_coefficient_gets_the_common_rate() -> None:
    """More work of the second kind took less time, so its own rate would be negative."""
    work = np.array([[1e9, 0.0], [1e9, 1e8], [2e9, 0.0], [2e9, 2e8]])
    fit = fit_rates(work, np.ones((4, 1)), np.zeros(4), np.array([1.0, 0.9, 2.0, 1.8]))
    assert fit.rates[0] == fit.rates[1] > 0
    assert fit.note == "kinds of work not told apart"


def test_timings_that_fall_with_more_work_give_work_over_time() -> None:
    fit = fit_rates(np.array([[1e9], [2e9]]), np.ones((2, 1)), np.zeros(2), np.array([2.0, 1.0]))
    assert fit.rates == (1e9,)
    assert fit.fixed_s == (0.0,)
    assert "no fit was possible" in fit.note


def test_fits_use_relative_errors() -> None:
    """A short timing with 10% error has as much weight as a long one."""
    work = np.array([[1e6], [1e12]])
    fit = fit_rates(work, np.zeros((2, 0)), np.zeros(2), np.array([1.1e-6, 1.0]))
    assert 1e12 / 1.1 < fit.rates[0] < 1e12
    assert fit.error == pytest.approx(0.05, rel=0.1)


def test_a_ratio_is_the_median_and_its_error_shows_the_spread() -> None:
    forward = np.array([1.0, 2.0, 4.0])
    assert fit_ratio(2 * forward, forward) == (2.0, 0.0)
    ratio, error = fit_ratio(np.array([2.0, 4.0, 16.0]), forward)
    # Ratios 2, 2 and 4: the last time is twice what the median predicts.
    assert ratio == 2.0
    assert error == pytest.approx(0.5 / np.sqrt(3))


def grouped_seconds(
    rows: tuple[int, ...], tile: int, rate: float, row_flops: float, row_s: float, read_s: float, copy_s: float,
    own_s: float,
) -> float:  # fmt: skip
    """Seconds of a pass, computed copy by copy."""
    seconds = own_s
    for n in rows:
        if n > 0:
            tiles = (n + tile - 1) // tile
            seconds += copy_s + max(tiles * tile * row_flops / rate, read_s) + n * row_s
    return seconds


@settings(max_examples=40)
@given(st.sampled_from([1, 64, 128]), st.floats(1e10, 1e15), st.floats(0, 5), st.floats(0, 2), st.floats(0, 20))
def test_costs_of_grouped_products_are_recovered(
    tile: int, rate: float, copies: float, own: float, read: float
) -> None:
    """Costs are multiples of a tile's time, or of 16 rows if there are no tiles. Reading weights may take longer."""
    row_flops = 1e7
    unit = max(tile, 16) * row_flops / rate
    costs = {"copy_s": copies * unit, "own_s": own * unit, "row_s": 0.1 * unit / 64, "read_s": read * unit}
    loads = [*((n,) * 16 for n in (700, 1024, 4096, 300, 16)), (2048,) * 8 + (0,) * 8, (5000, 1, 0, 640)]
    timings = [GroupedTiming(load, grouped_seconds(load, tile, rate, row_flops, **costs)) for load in loads]
    fit = fit_grouped(
        timings, row_flops=row_flops, row_memory_s=costs["row_s"], weights_s=costs["read_s"], tile_rows=tile
    )
    assert fit.rates[0] == pytest.approx(rate, rel=1e-4)
    assert fit.fixed_s == pytest.approx((costs["copy_s"], costs["own_s"]), rel=1e-3, abs=1e-5 * unit)


def test_the_right_tile_fits_best() -> None:
    known = {"row_flops": 1e7, "row_memory_s": 1e-9, "weights_s": 3e-6}
    loads = [(n,) * 16 for n in (32, 64, 96, 128, 160, 192, 256, 288, 384, 2048)]
    timings = [GroupedTiming(load, grouped_seconds(load, 128, 4e14, 1e7, 1e-9, 3e-6, 1e-6, 20e-6)) for load in loads]
    errors = {tile: fit_grouped(timings, tile_rows=tile, **known).error for tile in (1, 16, 32, 64, 128, 256)}
    assert min(errors, key=lambda tile: errors[tile]) == 128
