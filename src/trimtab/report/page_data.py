"""Values of a page for its scripts: arrays, colour scales, heat maps, colour grids and timelines."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimtab.analysis import Analysis
from trimtab.analysis.analysis import worst_layers
from trimtab.array_type import Array
from trimtab.planner.plan.workload import max_over_mean
from trimtab.report.model import LoadMap, Report, Timeline
from trimtab.report.timelines import row_name, rows_of
from trimtab.timeline.recorded_operations import LANES


class PageArrays:
    """The HTML elements with a page's arrays."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def __call__(self, array: Array) -> dict[str, Any]:
        """Adds an array of integers below 2**50 in size. Returns what `common.js` needs to unpack it."""
        steps = np.diff(array.astype(np.int64).reshape(-1), prepend=0)
        # Signs go to the lowest bit, so that small negative values have few bytes too.
        coded = (steps << 1) ^ (steps >> 63)
        width = max(1, (int(coded.max(initial=0)).bit_length() + 7) // 8)
        # All lowest bytes, then all second bytes: alike bytes next to each other deflate better.
        planes = np.ascontiguousarray(coded.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T)
        text = base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode()
        name = f"array-{len(self.elements)}"
        self.elements.append(f'<script type="text/plain" id="{name}">{text}</script>')
        return {"id": name, "count": len(steps), "bytes": width}


# A scale excludes the highest 1/200 of the values, and is at least this wide.
SHOWN_PART = 0.995
LEAST_SPREAD = 0.1


@dataclass(frozen=True)
class ColourScale:
    """A range of colours. Values beyond it have the colour of its end.

    Attributes:
        low, high: values of the first and the last colour.
        least, most: smallest and largest value.
    """

    low: float
    high: float
    least: float
    most: float

    @property
    def clips_below(self) -> bool:
        return self.least < self.low

    @property
    def clips_above(self) -> bool:
        return self.most > self.high


def load_scale(maps: Sequence[LoadMap]) -> ColourScale:
    """Scale of loads over the mean load of their instance, symmetric around 1 except that no load is below 0."""
    ratios = np.concatenate([np.ones(1), *(_over_mean(part.loads_MLR).reshape(-1) for part in maps)])
    reach = float(np.quantile(np.abs(ratios[1:] - 1), SHOWN_PART)) if len(ratios) > 1 else 0.0
    spread = _rounded_up(max(LEAST_SPREAD, reach))
    return ColourScale(max(0.0, 1 - spread), 1 + spread, float(ratios.min()), float(ratios.max()))


def vio_scale(vio: Array) -> ColourScale:
    """Scale of max_vio from 0 up; NaN without load."""
    known = vio[~np.isnan(vio)]
    if not len(known):
        return ColourScale(0.0, LEAST_SPREAD, 0.0, 0.0)
    return ColourScale(
        0.0, _rounded_up(max(LEAST_SPREAD, float(np.quantile(known, SHOWN_PART)))), 0.0, float(known.max())
    )


def hot_scale(over_mean: Array) -> ColourScale:
    """Scale of an expert's tokens over those of the mean expert, which shows only what is above the mean."""
    known = over_mean[~np.isnan(over_mean)]
    return ColourScale(1.0, 4.0, float(known.min(initial=1.0)), float(known.max(initial=1.0)))


def overlap_scale(overlap_DD: Array) -> ColourScale:
    """Scale of the overlap of two domains; the overlap of a domain with itself, which is 1, is beyond its end."""
    others = overlap_DD[~np.eye(len(overlap_DD), dtype=bool)]
    low = min(0.95, float(np.floor(others.min() * 20) / 20))
    return ColourScale(low, max(_rounded_up(float(others.max())), low + 0.05), float(others.min()), 1.0)


def _over_mean(loads_MLR: Array) -> Array:
    """Loads over the mean of their instance; 1 where there is no load."""
    means = loads_MLR.mean(axis=2, keepdims=True)
    return np.divide(loads_MLR, means, out=np.ones(loads_MLR.shape), where=means > 0)


def _rounded_up(value: float) -> float:
    """Rounded up to a multiple of 0.05."""
    return float(np.ceil(value * 20) / 20)


BUSIEST_RANKS = 8
# Limits that keep large pages small: loads of a map that are exact to the token, and the resolution of a timeline.
MOST_EXACT = 100_000
MOST_TICKS = 1 << 20


def simulation_data(report: Report, arrays: PageArrays) -> dict[str, Any]:
    """Values of a step for the page's scripts."""
    maps = load_maps(report)
    return page_data(
        report.layer_names,
        [map_data(part, arrays) for part in maps],
        load_scale(maps),
        start_layer=int(uneven_layers(report.before)[0]) if maps else -1,
        timelines=[_timeline(timeline, arrays) for timeline in report.timelines],
    )


def page_data(
    layers: Sequence[str],
    maps: Sequence[dict[str, Any]],
    scale: ColourScale,
    *,
    start_layer: int,
    timelines: Sequence[dict[str, Any]] = (),
    grids: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Values that `common.js` reads as `report`.

    Args:
        layers: names of MoE layers.
        maps: see `map_data`; `scale` is their colour scale.
        start_layer: index of the layer that is shown first; -1 for the mean of all.
    """
    return {
        "layers": layers, "maps": maps, "spread": scale.high - 1, "start_layer": start_layer,
        "timelines": timelines, "grids": grids,
    }  # fmt: skip


def in_script(text: str) -> str:
    """JSON that can't end its script element."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def load_maps(report: Report) -> tuple[LoadMap, ...]:
    """Data of the heat map; empty without instances."""
    maps = (report.before, report.after)
    return maps if all(part.loads_MLR.size for part in maps) else ()


def uneven_layers(loads: LoadMap) -> Array:
    """Layers by mean max/mean, worst first, `[L]`."""
    return np.argsort(-max_over_mean(loads.loads_MLR).mean(axis=0), kind="stable")


def busiest_ranks(timeline: Timeline) -> list[int]:
    """Ranks with most compute time, ascending; waiting is not counted."""
    works = np.array(["wait" not in name for name in timeline.names], bool)
    counts = (timeline.lane_N == LANES.index("compute")) & works[timeline.kind_N]
    num_ranks = int(timeline.rank_N.max(initial=-1)) + 1
    spent = np.where(counts, timeline.end_N - timeline.start_N, 0.0)
    busy_R = np.bincount(timeline.rank_N, spent, minlength=num_ranks)
    present = np.unique(timeline.rank_N)
    return np.sort(present[np.argsort(-busy_R[present], kind="stable")][:BUSIEST_RANKS]).tolist()


def map_data(part: LoadMap, arrays: PageArrays) -> dict[str, Any]:
    """One heat map of rank loads, in multiples of `unit` tokens: 1 unless the map is large."""
    loads = part.loads_MLR
    M, L, R = loads.shape
    unit = 1
    if loads.size > MOST_EXACT:
        # At most 1/512 of the mean load: the error is invisible in ratios with two decimals.
        unit = 1 << max(0, int(np.log2(max(1.0, loads.mean() / 512))))
    # Micro-steps of a layer and rank are alike, so they are neighbours.
    values = np.rint(loads / unit).transpose(1, 2, 0)
    return {"title": part.title, "M": M, "L": L, "R": R, "unit": unit, "array": arrays(values)}


def _timeline(timeline: Timeline, arrays: PageArrays) -> dict[str, Any]:
    total = float(timeline.end_N.max(initial=0.0))
    tick = max(1e-9, total / MOST_TICKS)
    rows = rows_of(timeline, tick)
    lengths = np.diff(rows.starts_W1)
    lanes, lane_W = np.unique(np.stack([rows.lane_W, rows.row_W], axis=1), axis=0, return_inverse=True)
    lane_N, rank_N = (np.repeat(each, lengths) for each in (lane_W.reshape(-1), rows.rank_W))
    kind_N = timeline.kind_N[rows.order_N]
    layer_N = timeline.layer_N[rows.order_N]
    # The same operation of all ranks starts at about the same time, so ranks are neighbours.
    order = np.lexsort((rows.start_N, rank_N, layer_N, lane_N, kind_N))
    start_N = rows.start_N[order]
    return {
        "title": timeline.title,
        "names": timeline.names,
        "lanes": [row_name(lane, row) for lane, row in lanes.tolist()],
        "total": max(total, tick),
        "tick": tick,
        "ranks": np.unique(timeline.rank_N).tolist(),
        "busiest": busiest_ranks(timeline),
        "arrays": {
            "kind": arrays(kind_N[order]),
            "lane": arrays(lane_N[order]),
            "rank": arrays(rank_N[order]),
            "layer": arrays(layer_N[order]),
            "start": arrays(start_N),
            "length": arrays(rows.end_N[order] - start_N),
        },
    }


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
