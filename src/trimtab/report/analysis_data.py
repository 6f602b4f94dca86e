"""Data of an analysis page: rank loads and colour grids, small enough for one file."""

from __future__ import annotations

from typing import Any

import numpy as np

from trimtab.analysis import Analysis
from trimtab.analysis.analysis import worst_layers
from trimtab.array_type import Array
from trimtab.report.colour_scale import ColourScale, hot_scale, load_scale, overlap_scale, vio_scale
from trimtab.report.model import LoadMap
from trimtab.report.page_arrays import PageArrays
from trimtab.report.payload import map_data, page_data

# Limit of bytes of a figure's values, before compression; micro-steps are left out or joined to stay below.
MOST_BYTES = 800_000
LEAST_COLUMNS, MOST_COLUMNS = 16, 600
# Resolution of values: of ratios, and of an expert's tokens over the mean expert's.
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


def analysis_data(analysis: Analysis, arrays: PageArrays) -> dict[str, Any]:
    """Values for the page's scripts."""
    layers = [str(index) for index in analysis.counts.layer_indices]
    loads, chosen = load_map(analysis)
    return page_data(
        layers,
        [map_data(loads, arrays) | {"columns": chosen.tolist()}],
        load_scale((loads,)),
        start_layer=worst_layers(analysis)[0],
        grids=[
            _vio_grid(analysis, layers, arrays),
            _expert_grid(analysis, layers, arrays),
            *([_overlap_grid(analysis, arrays)] if len(analysis.domains) > 1 else []),
        ],
    )


def vio_values(analysis: Analysis) -> Array:
    """max_vio `[L, C]` of layers by columns of micro-steps, NaN without load."""
    starts = vio_columns(analysis)
    known_ML = ~np.isnan(analysis.max_over_mean_ML)
    sums = np.add.reduceat(np.where(known_ML, analysis.max_over_mean_ML - 1, 0), starts, axis=0)
    numbers = np.add.reduceat(known_ML.astype(np.int64), starts, axis=0)
    return np.divide(sums, numbers, out=np.full(sums.shape, np.nan), where=numbers > 0).T


def hot_values(analysis: Analysis) -> Array:
    """Tokens over those of the mean expert, `[L, E, C]` by layer, expert and chosen micro-step; NaN without load."""
    chosen, counts = hot_columns(analysis), analysis.counts
    over_LEC = np.empty((counts.num_layers, counts.num_experts, len(chosen)))
    for column, m in enumerate(chosen.tolist()):
        counts_LE = counts.counts_FLE[m * counts.parts : (m + 1) * counts.parts].sum(axis=0, dtype=np.int64)
        totals_L1 = counts_LE.sum(axis=1, keepdims=True)
        over = counts_LE * counts.num_experts / np.maximum(1, totals_L1)
        over_LEC[:, :, column] = np.where(totals_L1 > 0, over, np.nan)
    return over_LEC


def _vio_grid(analysis: Analysis, layers: list[str], arrays: PageArrays) -> dict[str, Any]:
    values_LC = vio_values(analysis)
    return _grid(
        "vio", ("layer", "micro-step"), layers, vio_columns(analysis).tolist(), values_LC[None], arrays,
        vio_scale(values_LC), "max_vio",
    )  # fmt: skip


def _expert_grid(analysis: Analysis, layers: list[str], arrays: PageArrays) -> dict[str, Any]:
    experts = [str(expert) for expert in range(analysis.counts.num_experts)]
    values_LEC = hot_values(analysis)
    grid = _grid(
        "hot", ("expert", "micro-step"), experts, hot_columns(analysis).tolist(), values_LEC, arrays,
        hot_scale(values_LEC), "times the mean expert", unit=COARSE,
    )  # fmt: skip
    return grid | {"planes": [f"layer {name}" for name in layers], "start": worst_layers(analysis)[0]}


def _overlap_grid(analysis: Analysis, arrays: PageArrays) -> dict[str, Any]:
    names = [name or "(no label)" for name in analysis.counts.domains]
    grid = _grid(
        "overlap", ("", "and"), names, names, analysis.overlap_DD[None], arrays, overlap_scale(analysis.overlap_DD),
        "of their load in common",
    )  # fmt: skip
    return grid | {"percent": True}


def _grid(
    name: str,
    words: tuple[str, str],
    rows: list[str],
    columns: list[Any],
    values_PRC: Array,
    arrays: PageArrays,
    scale: ColourScale,
    label: str,
    *,
    unit: float = FINE,
) -> dict[str, Any]:
    """A colour grid for `grid.js`, of one plane.

    Args:
        words: what a row and a column is.
        values_PRC: `[P, R, C]` floats by plane, row and column; NaN without load.
        label: text after a value.
        unit: values are sent as multiples of this unit, plus 1; 0 is NaN.
    """
    coded = np.where(np.isnan(values_PRC), 0, 1 + np.rint(np.nan_to_num(values_PRC) / unit))
    return {
        "name": name,
        "words": words,
        "rows": rows,
        "columns": [str(column) for column in columns],
        "planes": [""],
        "start": 0,
        "array": arrays(coded),
        "unit": unit,
        "low": scale.low,
        "high": scale.high,
        "label": label,
        "percent": False,
    }


def _columns(column_bytes: int) -> int:
    return min(MOST_COLUMNS, max(LEAST_COLUMNS, MOST_BYTES // max(1, column_bytes)))


def _evenly(count: int, most: int) -> Array:
    """At most this many of 0 to count - 1, evenly spaced."""
    return np.arange(count) if count <= most else np.arange(0, count, -(-count // most))
