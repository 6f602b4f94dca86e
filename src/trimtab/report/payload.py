"""A report's values for the page's scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.plan.workload import max_over_mean
from trimtab.report.colour_scale import ColourScale, load_scale
from trimtab.report.model import LoadMap, Report, Timeline
from trimtab.report.page_arrays import PageArrays
from trimtab.report.timeline_rows import row_name, rows_of
from trimtab.simulator.recorded_operations import LANES

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
        start_layer=int(worst_layers(report.before)[0]) if maps else -1,
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


def worst_layers(loads: LoadMap) -> Array:
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
