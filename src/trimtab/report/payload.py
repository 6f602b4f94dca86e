"""A report's arrays inside the page: base64 of little-endian numbers, in the smallest dtype."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.plan.workload import max_over_mean
from trimtab.report.model import LoadMap, Report, Timeline
from trimtab.report.timeline_rows import TimelineRows, rows_of
from trimtab.simulator.recorded_operations import LANES

NO_LAYER = 65535
BUSIEST_RANKS = 8
# The heat map scale excludes the highest 1/200 of (instance, rank) loads, and is at least this wide.
SHOWN_PART = 0.995
LEAST_SPREAD = 0.1


class Blobs:
    """The HTML elements with a page's arrays."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def __call__(self, array: Array, dtype: str) -> dict[str, str]:
        """Adds an array. Returns its element and its type, one of `TYPES` in `common.js`."""
        name = f"blob-{len(self.elements)}"
        text = base64.b64encode(np.ascontiguousarray(array, f"<{dtype}").tobytes()).decode()
        self.elements.append(f'<script type="text/plain" id="{name}">{text}</script>')
        return {"id": name, "type": dtype}


def simulation_data(report: Report, blob: Blobs) -> dict[str, Any]:
    """Values of a step for the page's scripts."""
    maps = load_maps(report)
    return page_data(
        report.layer_names,
        [map_data(part, blob) for part in maps],
        load_spread(maps),
        start_layer=int(worst_layers(report.before)[0]) if maps else -1,
        timelines=[_timeline(timeline, blob) for timeline in report.timelines],
    )


def page_data(
    layers: Sequence[str],
    maps: Sequence[dict[str, Any]],
    spread: float,
    *,
    start_layer: int,
    timelines: Sequence[dict[str, Any]] = (),
    grids: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Values that `common.js` reads as `report`.

    Args:
        layers: names of MoE layers.
        maps: see `map_data`; `spread` is the distance from 1 to the ends of their colour scale.
        start_layer: index of the layer that is shown first; -1 for the mean of all.
    """
    return {
        "layers": layers, "lanes": LANES, "maps": maps, "spread": spread, "start_layer": start_layer,
        "timelines": timelines, "grids": grids,
    }  # fmt: skip


def in_script(text: str) -> str:
    """JSON that can't end its script element."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def load_maps(report: Report) -> tuple[LoadMap, ...]:
    """Data of the heat map; empty without instances."""
    maps = (report.before, report.after)
    return maps if all(part.loads_MLR.size for part in maps) else ()


def worst_layers(loads: LoadMap) -> Array:
    """Layers by mean max/mean, worst first, `[L]`."""
    return np.argsort(-max_over_mean(loads.loads_MLR).mean(axis=0), kind="stable")


def load_spread(maps: Sequence[LoadMap]) -> float:
    """Distance from 1 to each end of the colour scale."""
    away = [np.empty(0)]
    for part in maps:
        means = part.loads_MLR.mean(axis=2, keepdims=True)
        ratios = np.divide(part.loads_MLR, means, out=np.ones(part.loads_MLR.shape), where=means > 0)
        away.append(np.abs(ratios - 1).reshape(-1))
    together = np.concatenate(away)
    reach = float(np.quantile(together, SHOWN_PART)) if together.size else 0.0
    return max(LEAST_SPREAD, np.ceil(reach * 20) / 20)


def busiest_ranks(timeline: Timeline) -> list[int]:
    """Ranks with most compute time, ascending; waiting is not counted."""
    works = np.array(["wait" not in name for name in timeline.names], bool)
    counts = (timeline.lane_N == LANES.index("compute")) & works[timeline.kind_N]
    num_ranks = int(timeline.rank_N.max(initial=-1)) + 1
    spent = np.where(counts, timeline.end_N - timeline.start_N, 0.0)
    busy_R = np.bincount(timeline.rank_N, spent, minlength=num_ranks)
    present = np.unique(timeline.rank_N)
    return np.sort(present[np.argsort(-busy_R[present], kind="stable")][:BUSIEST_RANKS]).tolist()


def map_data(part: LoadMap, blob: Blobs) -> dict[str, Any]:
    """One heat map of rank loads."""
    loads = part.loads_MLR
    largest = int(loads.max(initial=0))
    dtype = "u1" if largest < 1 << 8 else "u2" if largest < 1 << 16 else "u4" if largest < 1 << 32 else "f8"
    M, L, R = loads.shape
    return {"title": part.title, "M": M, "L": L, "R": R, "blob": blob(loads, dtype)}


def _timeline(timeline: Timeline, blob: Blobs) -> dict[str, Any]:
    total = float(timeline.end_N.max(initial=0.0))
    # Nanoseconds, or the coarser unit that fits 32 bits.
    tick = max(1e-9, total / (2**32 - 2))
    rows = rows_of(timeline, tick)
    layers = timeline.layer_N[rows.order_N].astype(np.int64)
    return {
        "title": timeline.title,
        "names": timeline.names,
        "total": max(total, tick),
        "tick": tick,
        "no_layer": NO_LAYER,
        "rows": _row_list(rows),
        "ranks": np.unique(timeline.rank_N).tolist(),
        "busiest": busiest_ranks(timeline),
        "blobs": {
            "kind": blob(timeline.kind_N[rows.order_N], "u1"),
            "layer": blob(np.where(layers < 0, NO_LAYER, layers), "u2"),
            "start": blob(rows.start_N, "u4"),
            "end": blob(rows.end_N, "u4"),
        },
    }


def _row_list(rows: TimelineRows) -> list[list[int]]:
    """Rank, lane, first operation and number of operations of each row."""
    return np.stack([rows.rank_W, rows.lane_W, rows.starts_W1[:-1], np.diff(rows.starts_W1)], axis=1).tolist()
