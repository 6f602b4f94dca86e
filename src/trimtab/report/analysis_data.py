"""Data of an analysis page: rank loads and colour grids, small enough for one file."""

from __future__ import annotations

from typing import Any

import numpy as np

from trimtab.analysis import Analysis
from trimtab.analysis.analysis import worst_layers
from trimtab.array_type import Array
from trimtab.report.model import LoadMap
from trimtab.report.payload import Blobs, load_spread, map_data, page_data

# Limit of bytes of a figure's values, before base64; micro-steps are left out or joined to stay below.
MOST_BYTES = 800_000
LEAST_COLUMNS, MOST_COLUMNS = 16, 600
# Resolution of values: of ratios in two bytes, and of an expert's tokens over the mean expert's in one.
FINE, COARSE = 1e-3, 1 / 16


def load_map(analysis: Analysis) -> tuple[LoadMap, Array]:
    """Rank loads of evenly chosen micro-steps, and their indices."""
    loads = analysis.loads_MLR
    chosen = _evenly(len(loads), _columns(loads[0].size * (2 if loads.max(initial=0) < 1 << 16 else 4)))
    return LoadMap("contiguous homes", loads[chosen]), chosen


def hot_columns(analysis: Analysis) -> Array:
    """Micro-steps of the hot-expert strips."""
    counts = analysis.counts
    return _evenly(counts.num_micro_steps, _columns(counts.num_layers * counts.num_experts))


def vio_columns(analysis: Analysis) -> Array:
    """First micro-step of each column of the map of layers by micro-step."""
    count = analysis.counts.num_micro_steps
    size = -(-count // MOST_COLUMNS)
    return np.arange(0, count, size)


def _vio_span(analysis: Analysis) -> tuple[float, float]:
    """Colour range of max_vio; the highest half percent has one colour."""
    known = analysis.max_over_mean_ML[~np.isnan(analysis.max_over_mean_ML)] - 1
    return 0.0, max(0.1, float(np.ceil(np.quantile(known, 0.995) * 20) / 20)) if len(known) else 0.1


def _overlap_span(analysis: Analysis) -> tuple[float, float]:
    """Colour range of the overlap of two domains, without the diagonal."""
    others = analysis.overlap_DD[~np.eye(len(analysis.overlap_DD), dtype=bool)]
    low = float(np.floor(others.min() * 20) / 20)
    return min(low, 0.95), max(float(np.ceil(others.max() * 20) / 20), min(low, 0.95) + 0.05)


def analysis_data(analysis: Analysis, blob: Blobs) -> dict[str, Any]:
    """Values for the page's scripts."""
    layers = [str(index) for index in analysis.counts.layer_indices]
    loads, chosen = load_map(analysis)
    return page_data(
        layers,
        [map_data(loads, blob) | {"columns": chosen.tolist()}],
        load_spread((loads,)),
        start_layer=worst_layers(analysis)[0],
        grids=[
            _vio_grid(analysis, layers, blob),
            _expert_grid(analysis, layers, blob),
            *([_overlap_grid(analysis, blob)] if len(analysis.domains) > 1 else []),
        ],
    )


def _vio_grid(analysis: Analysis, layers: list[str], blob: Blobs) -> dict[str, Any]:
    starts = vio_columns(analysis)
    known_ML = ~np.isnan(analysis.max_over_mean_ML)
    sums = np.add.reduceat(np.where(known_ML, analysis.max_over_mean_ML - 1, 0), starts, axis=0)
    numbers = np.add.reduceat(known_ML.astype(np.int64), starts, axis=0)
    vio_CL = np.divide(sums, numbers, out=np.full(sums.shape, np.nan), where=numbers > 0)
    return _grid(
        "vio", ("layer", "micro-step"), layers, starts.tolist(), vio_CL.T[None], blob, _vio_span(analysis), "max_vio"
    )


def _expert_grid(analysis: Analysis, layers: list[str], blob: Blobs) -> dict[str, Any]:
    chosen, counts = hot_columns(analysis), analysis.counts
    over_LEC = np.empty((counts.num_layers, counts.num_experts, len(chosen)))
    for column, m in enumerate(chosen.tolist()):
        counts_LE = counts.counts_FLE[m * counts.parts : (m + 1) * counts.parts].sum(axis=0, dtype=np.int64)
        totals_L1 = counts_LE.sum(axis=1, keepdims=True)
        over = counts_LE * counts.num_experts / np.maximum(1, totals_L1)
        over_LEC[:, :, column] = np.where(totals_L1 > 0, over, np.nan)
    experts = [str(expert) for expert in range(counts.num_experts)]
    grid = _grid(
        "hot", ("expert", "micro-step"), experts, chosen.tolist(), over_LEC, blob, (1.0, 4.0), "times the mean expert",
        dtype="u1", unit=COARSE,
    )  # fmt: skip
    planes = [f"layer {name}" for name in layers]
    return grid | {"planes": planes, "start": worst_layers(analysis)[0], "unit_sign": "×"}


def _overlap_grid(analysis: Analysis, blob: Blobs) -> dict[str, Any]:
    names = [name or "(no label)" for name in analysis.counts.domains]
    grid = _grid(
        "overlap", ("", "and"), names, names, analysis.overlap_DD[None], blob, _overlap_span(analysis),
        "of their load in common",
    )  # fmt: skip
    return grid | {"percent": True}


def _grid(
    name: str,
    words: tuple[str, str],
    rows: list[str],
    columns: list[Any],
    values_PRC: Array,
    blob: Blobs,
    span: tuple[float, float],
    label: str,
    *,
    dtype: str = "u2",
    unit: float = FINE,
) -> dict[str, Any]:
    """A colour grid for `grid.js`, of one plane.

    Args:
        words: what a row and a column is.
        values_PRC: `[P, R, C]` floats by plane, row and column; NaN without load.
        span: values of the first and the last colour.
        label: text after a value.
        dtype, unit: values are sent as integers of this type, in multiples of this unit.
    """
    none = np.iinfo(dtype).max
    coded = np.where(np.isnan(values_PRC), none, np.minimum(none - 1, np.rint(np.nan_to_num(values_PRC) / unit)))
    return {
        "name": name,
        "words": words,
        "rows": rows,
        "columns": [str(column) for column in columns],
        "planes": [""],
        "start": 0,
        "blob": blob(coded, dtype),
        "none": none,
        "unit": unit,
        "low": span[0],
        "high": span[1],
        "label": label,
        "percent": False,
        "unit_sign": "",
    }


def _columns(column_bytes: int) -> int:
    return min(MOST_COLUMNS, max(LEAST_COLUMNS, MOST_BYTES // max(1, column_bytes)))


def _evenly(count: int, most: int) -> Array:
    """At most this many of 0 to count - 1, evenly spaced."""
    return np.arange(count) if count <= most else np.arange(0, count, -(-count // most))
