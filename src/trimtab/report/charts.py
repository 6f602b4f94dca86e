"""Small charts as inline SVG without scripts: lines over named positions, and bars of a distribution."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 210
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 14, 42
# Units between the middles of labels below a chart, and of a label's character.
LABELS_APART, CHARACTER = 14, 6.5
COLOURS = ("accent", "imbalance", "migration", "planning")


@dataclass(frozen=True)
class Line:
    """One line of a chart; None for a missing point."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class LineChart:
    """Lines over named positions.

    Attributes:
        x_label: label of the positions.
        places: names of the positions.
    """

    title: str
    x_label: str
    places: Sequence[str]
    lines: Sequence[Line]


def line_chart(chart: LineChart) -> str:
    """SVG of a chart, from 0 up, with a tooltip for every point."""
    places, lines = chart.places, chart.lines
    top = _rounded_up(max((value for line in lines for value in line.values if value is not None), default=0.0))
    x = [_across((index + 0.5) / len(places)) for index in range(len(places))]
    drawn = []
    for colour, line in zip(COLOURS, lines, strict=False):
        points = [(at, _up(value / top), value, place)
                  for at, value, place in zip(x, line.values, places, strict=True) if value is not None]  # fmt: skip
        path = " ".join(f"{at:.1f},{y:.1f}" for at, y, _, _ in points)
        dots = "".join(
            f'<circle cx="{at:.1f}" cy="{y:.1f}" r="4"><title>{escape(f"{line.name}, {place}: {value:.3f}")}</title>'
            "</circle>"
            for at, y, value, place in points
        )
        drawn.append(f'<g style="--c:var(--{colour})"><polyline points="{path}"/>{dots}</g>')
    legend = "".join(
        f'<li><i style="--c:var(--{colour})"></i>{escape(line.name)}</li>'
        for colour, line in zip(COLOURS, lines, strict=False)
    )
    shown = f'<ul class="legend">{legend}</ul>' if len(lines) > 1 else ""
    names = list(zip(x, places, strict=True))
    widest = max(map(len, places), default=0) * CHARACTER + LABELS_APART
    every = math.ceil(widest * len(places) / (WIDTH - LEFT - RIGHT)) or 1
    return _figure(chart.title, _levels(top) + _axis(names[::every]) + "".join(drawn), chart.x_label, shown)


def bar_chart(
    title: str,
    bars: Sequence[tuple[str, int]],
    x_label: str,
    *,
    edges: Sequence[str] = (),
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """SVG of bars of counts.

    Args:
        bars: name and count.
        edges: names of the edges between bars, for a histogram; by default each bar's name is below it.
        marks: positions, as a part of the width, and labels of vertical lines.
    """
    top = _rounded_up(max((count for _, count in bars), default=0))
    width = (WIDTH - LEFT - RIGHT) / len(bars)
    drawn = []
    for index, (name, count) in enumerate(bars):
        height = count / top * (HEIGHT - TOP - BOTTOM)
        drawn.append(
            f'<rect x="{LEFT + index * width + 0.5:.1f}" y="{HEIGHT - BOTTOM - height:.1f}" width="{width - 1:.1f}" '
            f'height="{height:.1f}"><title>{escape(f"{name}: {count:,}")}</title></rect>'
        )
    places = (
        [(_across(index / (len(edges) - 1)), text) for index, text in enumerate(edges)]
        if edges
        else [(_across((index + 0.5) / len(bars)), name) for index, (name, _) in enumerate(bars)]
    )
    lines = ""
    for index, (at, text) in enumerate(marks):
        side = "end" if at > 0.7 else "start"
        x, y = _across(min(1.0, at)), TOP + 6 + 14 * index
        lines += (
            f'<g class="mark"><line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text x="{x + (-5 if side == "end" else 5):.1f}" y="{y}" text-anchor="{side}">{escape(text)}</text></g>'
        )
    return _figure(title, f"{_levels(top)}{_axis(places)}<g>{''.join(drawn)}</g>{lines}", x_label, "")


def _figure(title: str, drawn: str, x_label: str, legend: str) -> str:
    below = f'<text x="{LEFT}" y="{HEIGHT - 8}">{escape(x_label)}</text>'
    return (
        f'<figure class="chart"><figcaption><b>{escape(title)}</b></figcaption>{legend}'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{drawn}{below}</svg></figure>'
    )


def _axis(places: Iterable[tuple[float, str]]) -> str:
    """Names below the chart, centred at given x."""
    return "".join(
        f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(name)}</text>' for x, name in places
    )


def _levels(top: float) -> str:
    """Values of three grid lines."""
    return "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_up(part):.1f}" y2="{_up(part):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{_up(part) + 4:.1f}" text-anchor="end">{_short(part * top)}</text>'
        for part in (0.0, 0.5, 1.0)
    )


def _short(value: float) -> str:
    return f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k" if value >= 1e4 else f"{value:g}"


def _rounded_up(value: float) -> float:
    """A round number greater than 0 that is not less."""
    if value <= 0:
        return 1.0
    unit = 1e-3
    while True:
        for step in (1, 1.5, 2, 3, 4, 5, 6, 8):
            if step * unit >= value:
                return step * unit
        unit *= 10


def _across(part: float) -> float:
    return LEFT + part * (WIDTH - LEFT - RIGHT)


def _up(part: float) -> float:
    return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)
