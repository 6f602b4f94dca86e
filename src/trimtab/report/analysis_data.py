"""Data of an analysis page: rank loads and colour grids, small enough for one file."""

from __future__ import annotations

from typing import Any

import numpy as np

from trimtab.analysis import Analysis
from trimtab.analysis.analysis import worst_layers
from trimtab.array_type import Array
from trimtab.report.model import LoadMap
from trimtab.report.payload import Blobs, load_spread, map_data

# Limit of bytes of a figure's values, before base64; micro-steps are left out or joined to stay below.
MOST_BYTES = 800_000
LEAST_COLUMNS, MOST_COLUMNS = 16, 600
NO_VALUE = 65535
NO_SMALL_VALUE = 255
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


def vio_span(analysis: Analysis) -> tuple[float, float]:
    """Colour range of max_vio; the highest half percent has one colour."""
    known = analysis.max_over_mean_ML[~np.isnan(analysis.max_over_mean_ML)] - 1
    return 0.0, max(0.1, float(np.ceil(np.quantile(known, 0.995) * 20) / 20)) if len(known) else 0.1


def overlap_span(analysis: Analysis) -> tuple[float, float]:
    """Colour range of the overlap of two domains, without the diagonal."""
    others = analysis.overlap_DD[~np.eye(len(analysis.overlap_DD), dtype=bool)]
    low = float(np.floor(others.min() * 20) / 20)
    return min(low, 0.95), max(float(np.ceil(others.max() * 20) / 20), min(low, 0.95) + 0.05)


def analysis_data(analysis: Analysis, blob: Blobs) -> dict[str, Any]:
    """Returns the page's values."""
    counts = analysis.counts
    layers = [str(index) for index in counts.layer_indices]
    loads, chosen = load_map(analysis)
    return {
        "layers": layers,
        "lanes": (),
        "maps": [map_data(loads, blob) | {"columns": chosen.tolist()}],
        "spread": load_spread((loads,)),
        "start_layer": worst_layers(analysis)[0],
        "timelines": [],
        "grids": [
            _vio(analysis, layers, blob),
            _hot(analysis, layers, blob),
            *([_overlap(analysis, blob)] if len(analysis.domains) > 1 else []),
        ],
    }


def _vio(analysis: Analysis, layers: list[str], blob: Blobs) -> dict[str, Any]:
    starts = vio_columns(analysis)
    known_ML = ~np.isnan(analysis.max_over_mean_ML)
    sums = np.add.reduceat(np.where(known_ML, analysis.max_over_mean_ML - 1, 0), starts, axis=0)
    counts = np.add.reduceat(known_ML.astype(np.int64), starts, axis=0)
    vio_CL = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    return _grid("vio", ("layer", "micro-step"), layers, starts.tolist(), vio_CL.T[None], blob, vio_span(analysis))


def _hot(analysis: Analysis, layers: list[str], blob: Blobs) -> dict[str, Any]:
    chosen = hot_columns(analysis)
    counts = analysis.counts
    over = np.empty((counts.num_layers, counts.num_experts, len(chosen)), np.uint8)
    for column, m in enumerate(chosen.tolist()):
        counts_LE = counts.counts_FLE[m * counts.parts : (m + 1) * counts.parts].sum(axis=0, dtype=np.int64)
        totals_L1 = counts_LE.sum(axis=1, keepdims=True)
        parts = np.minimum(
            NO_SMALL_VALUE - 1, np.rint(counts_LE * counts.num_experts / COARSE / np.maximum(1, totals_L1))
        )
        over[:, :, column] = np.where(totals_L1 > 0, parts, NO_SMALL_VALUE)
    return {
        "name": "hot",
        "words": ("expert", "micro-step"),
        "rows": [str(expert) for expert in range(counts.num_experts)],
        "columns": [str(m) for m in chosen.tolist()],
        "planes": [f"layer {name}" for name in layers],
        "start": worst_layers(analysis)[0],
        "blob": blob(over, "u1"),
        "none": NO_SMALL_VALUE,
        "unit": COARSE,
        "low": 1.0,
        "high": 4.0,
        "says": "times the mean expert",
        "percent": False,
    }


def _overlap(analysis: Analysis, blob: Blobs) -> dict[str, Any]:
    names = [name or "(no label)" for name in analysis.counts.domains]
    overlap_DD = analysis.overlap_DD
    values = _grid("overlap", ("", "and"), names, names, overlap_DD[None], blob, overlap_span(analysis))
    return values | {"says": "of their load in common", "percent": True}


def _grid(
    name: str,
    words: tuple[str, str],
    rows: list[str],
    columns: list[Any],
    values_PRC: Array,
    blob: Blobs,
    span: tuple[float, float],
) -> dict[str, Any]:
    coded = np.where(
        np.isnan(values_PRC), NO_VALUE, np.minimum(NO_VALUE - 1, np.rint(np.nan_to_num(values_PRC) / FINE))
    )
    return {
        "name": name,
        "words": words,
        "rows": rows,
        "columns": [str(column) for column in columns],
        "planes": [""],
        "start": 0,
        "blob": blob(coded, "u2"),
        "none": NO_VALUE,
        "unit": FINE,
        "low": span[0],
        "high": span[1],
        "says": "max_vio",
        "percent": False,
    }


def _columns(column_bytes: int) -> int:
    return min(MOST_COLUMNS, max(LEAST_COLUMNS, MOST_BYTES // max(1, column_bytes)))


def _evenly(count: int, most: int) -> Array:
    """At most this many of 0 to count - 1, evenly spaced."""
    return np.arange(count) if count <= most else np.arange(0, count, -(-count // most))
