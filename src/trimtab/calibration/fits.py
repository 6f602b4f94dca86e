"""Rates and fixed costs fitted to timings, by least squares without negative coefficients. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.array_type import Array


@dataclass(frozen=True)
class Fit:
    """Rates and fixed costs that explain timings.

    Attributes:
        rates: units per second of each kind of work.
        fixed_s: seconds of each kind of fixed cost; 0 where least squares would have it negative.
        error: root mean square of (predicted - measured) / measured.
        note: a remark for the figure's source, if the fit is not an ordinary one.
    """

    rates: tuple[float, ...]
    fixed_s: tuple[float, ...]
    error: float
    note: str = ""


def fit_rates(work_PW: Array, fixed_PF: Array, known_P: Array, seconds_P: Array) -> Fit:
    """Solve `seconds = known + sum of work / rate + sum of fixed * fixed_s`, in relative errors.

    Kinds of work whose coefficients are not all positive get one common rate. If that fails too, the rate is all work
    divided by all time.

    Args:
        work_PW: `[P, W]` units of each kind of work in each of P timings; all kinds have the same unit.
        fixed_PF: `[P, F]` how often each fixed cost occurs in each timing.
        known_P: `[P]` seconds of each timing that other figures explain.
        seconds_P: `[P]` seconds, all above 0.
    """
    rest_P = seconds_P - known_P
    kinds = work_PW.shape[1]
    together_P1 = work_PW.sum(axis=1, keepdims=True)
    for columns_PW, note in ((work_PW, ""), (together_P1, "kinds of work not told apart"))[: min(kinds, 2)]:
        values = _least_squares(np.hstack([columns_PW, fixed_PF]), rest_P, seconds_P)
        works, fixed = values[: columns_PW.shape[1]], values[columns_PW.shape[1] :]
        if (works > 0).all():
            rates = np.broadcast_to(1 / works, kinds)
            predicted_P = known_P + columns_PW @ works + fixed_PF @ fixed
            return Fit(_floats(rates), _floats(fixed), _error(predicted_P, seconds_P), note)
    rate = float(together_P1.sum() / seconds_P.sum())
    predicted_P = together_P1[:, 0] / rate
    return Fit(
        (rate,) * kinds,
        (0.0,) * fixed_PF.shape[1],
        _error(predicted_P, seconds_P),
        "work over time: no fit was possible",
    )


def fit_ratio(measured_P: Array, reference_P: Array) -> tuple[float, float]:
    """Median of measured / reference over P timings, and its error: root mean square of the relative deviations."""
    ratio = float(np.median(measured_P / reference_P))
    return ratio, _error(ratio * reference_P, measured_P)


@dataclass(frozen=True)
class GroupedTiming:
    """One timed pass of grouped matrix products.

    Attributes:
        rows: rows of each copy of an expert.
        seconds: of the pass.
    """

    rows: tuple[int, ...]
    seconds: float


def fit_grouped(
    timings: Sequence[GroupedTiming],
    *,
    row_flops: float,
    row_memory_s: float,
    weights_s: float,
    tile_rows: int,
) -> Fit:
    """Fit grouped products: `rates[0]` operations per second; `fixed_s` seconds per copy with rows, and per pass.

    Time of a pass = its fixed seconds + row traffic + for each copy with rows: fixed seconds + max(time of its tiles,
    time of reading its weights).

    Args:
        row_flops: operations per row.
        row_memory_s: seconds of memory traffic per row.
        weights_s: seconds of reading a copy's weights.
        tile_rows: rows of a tile.
    """
    seconds_P = np.array([timing.seconds for timing in timings])
    rows = [np.array([n for n in timing.rows if n]) for timing in timings]
    memory_P = np.array([n.sum() * row_memory_s for n in rows])
    fixed_PF = np.array([[len(n), 1.0] for n in rows])
    tiled = [-(-n // tile_rows) * tile_rows * row_flops for n in rows]

    def fit_from(least: float) -> Fit:
        """The fit if copies with fewer operations than `least` take as long as reading their weights."""
        work_P1 = np.array([[flops[flops >= least].sum()] for flops in tiled])
        reading_P = weights_s * np.array([np.count_nonzero(flops < least) for flops in tiled])
        fit = fit_rates(work_P1, fixed_PF, memory_P + reading_P, seconds_P)
        longer_P = np.array([np.maximum(flops / fit.rates[0], weights_s).sum() for flops in tiled])
        return replace(fit, error=_error(memory_P + longer_P + fixed_PF @ fit.fixed_s, seconds_P))

    # Which copies those are depends on the rate, which is not known yet. There are few sizes, so all are tried.
    fits = [fit_from(least) for least in np.unique(np.concatenate(tiled))]
    return min(fits, key=lambda fit: (bool(fit.note), fit.error))


def _least_squares(columns_PC: Array, values_P: Array, weights_P: Array) -> Array:
    """`[C]` coefficients >= 0 with the smallest sum of squared relative errors.

    There are few columns, so every subset of nonzero coefficients is tried.
    """
    scaled_PC, scaled_P = columns_PC / weights_P[:, None], values_P / weights_P
    count = columns_PC.shape[1]
    best, least = np.zeros(count), float(scaled_P @ scaled_P)
    # Columns differ by twelve orders of magnitude, so they are scaled first.
    norms_C = np.linalg.norm(scaled_PC, axis=0)
    norms_C[norms_C == 0] = 1.0
    for chosen in itertools.product((False, True), repeat=count):
        kept = np.flatnonzero(chosen)
        if not len(kept):
            continue
        some = np.linalg.lstsq(scaled_PC[:, kept] / norms_C[kept], scaled_P, rcond=None)[0] / norms_C[kept]
        left = scaled_P - scaled_PC[:, kept] @ some
        if (some >= 0).all() and left @ left < least:
            best, least = np.zeros(count), float(left @ left)
            best[kept] = some
    return best


def _error(predicted_P: Array, seconds_P: Array) -> float:
    return float(np.sqrt(np.mean((predicted_P / seconds_P - 1) ** 2)))


def _floats(values: Array) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
