"""Charts: marks are where their values are on the grid, inside the picture, and have tooltips."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from trimtab.report.charts import Line, LineChart, bar_chart, line_chart

Points = list[tuple[float, float]]


def drawn(figure: str) -> ET.Element:
    (svg,) = re.findall(r"<svg.*</svg>", figure, re.S)
    return ET.fromstring(svg)


def numbers(element: ET.Element, *names: str) -> tuple[float, ...]:
    return tuple(float(element.attrib[name]) for name in names)


def grid(svg: ET.Element) -> list[tuple[float, float]]:
    """Value and height `y` of each grid line, whose label is just below it."""
    factors = {"k": 1e3, "M": 1e6}
    lines = [numbers(line, "y1")[0] for line in svg.findall("line")]
    texts = [each.text or "" for each in svg.findall("text") if each.get("text-anchor") == "end"]
    values = [float(text.rstrip("kM")) * factors.get(text[-1], 1.0) for text in texts]
    return list(zip(values, lines, strict=True))


def check_inside(svg: ET.Element) -> None:
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for element in svg.iter():
        for names, most in ((("x", "cx", "x1", "x2"), width), (("y", "cy", "y1", "y2"), height)):
            assert all(0 <= float(element.attrib[name]) <= most for name in names if name in element.attrib)


def y_of(svg: ET.Element, value: float) -> float:
    (low, low_y), _, (high, high_y) = grid(svg)
    assert low == 0
    assert high > 0
    return low_y + (high_y - low_y) * value / high


@pytest.mark.parametrize("scale", [1e-3, 1.0, 7e4, 3e6])
def test_points_of_lines_are_at_their_values(scale: float) -> None:
    values = [0.0, 0.3 * scale, None, 1.1 * scale]
    lines = [Line("one", values), Line("two", [scale, None, scale, scale])]
    svg = drawn(line_chart(LineChart("a < b", "layer", ["p", "q", "r", "s"], lines)))
    check_inside(svg)
    one, two = svg.findall("g")
    names = {text.text: numbers(text, "x")[0] for text in svg.findall("text") if text.get("text-anchor") == "middle"}
    assert list(names) == ["p", "q", "r", "s"]
    gaps = [right - left for left, right in pairwise(names.values())]
    assert gaps == pytest.approx(gaps[:1] * 3, abs=0.3)
    for group, line in ((one, lines[0]), (two, lines[1])):
        expected = [(x, v) for x, v in zip(names.values(), line.values, strict=True) if v is not None]
        dots = [numbers(circle, "cx", "cy") for circle in group.findall("circle")]
        assert dots == [pytest.approx((x, y_of(svg, value)), abs=0.2) for x, value in expected]
        (path,) = group.findall("polyline")
        assert [tuple(map(float, point.split(","))) for point in path.attrib["points"].split()] == dots
    assert [circle.findtext("title") for circle in one] [1:] == [
        f"one, {place}: {value:.3f}" for place, value in zip("pqs", (0.0, 0.3 * scale, 1.1 * scale), strict=True)
    ]  # fmt: skip
    assert len(grid(svg)) == 3
    assert grid(svg)[1][0] == pytest.approx(grid(svg)[2][0] / 2)


def test_only_several_lines_have_a_legend() -> None:
    for names in (["a<"], ["a<", "b"]):
        figure = line_chart(LineChart("t", "x", ["p"], [Line(name, [1.0]) for name in names]))
        assert figure.count("<li>") == (2 if len(names) > 1 else 0)
        assert ("a&lt;" in figure.split("<svg")[0]) == (len(names) > 1)


def test_bars_are_as_high_as_their_counts_and_marks_where_they_should_be() -> None:
    bars = [("none", 0), ("few", 5), ("many", 20_000)]
    marks = [(0.1, "left"), (0.9, "right"), (1.7, "beyond")]
    svg = drawn(bar_chart("t", bars, "tokens", marks=marks))
    check_inside(svg)
    bottom, rects = y_of(svg, 0.0), svg.findall("g/rect")
    for rect, (_, count) in zip(rects, bars, strict=True):
        y, height = numbers(rect, "y", "height")
        assert (y, y + height) == pytest.approx((y_of(svg, count), bottom), abs=0.2)
    (first_x, first_width), _, (last_x, last_width) = (numbers(rect, "x", "width") for rect in rects)
    left, right = numbers(svg.findall("line")[0], "x1", "x2")
    assert left <= first_x < left + 2
    assert right - 2 < last_x + last_width <= right
    assert first_width == last_width > (right - left) / 3 - 2
    found = svg.findall("g[@class='mark']")
    assert [mark.findtext("text") for mark in found] == ["left", "right", "beyond"]
    at = [numbers(line, "x1")[0] for mark in found for line in mark.findall("line")]
    assert at == pytest.approx([left + part * (right - left) for part in (0.1, 0.9, 1.0)], abs=0.1)
    # Texts are on the side where there is room, and none is over another.
    sides = [text.attrib["text-anchor"] for mark in found for text in mark.findall("text")]
    assert sides == ["start", "end", "end"]
    heights = {numbers(text, "y")[0] for mark in found for text in mark.findall("text")}
    assert len(heights) == 3
    assert grid(svg)[-1][1] < min(heights) < max(heights) < bottom


def test_edges_of_a_histogram_are_between_its_bars() -> None:
    svg = drawn(bar_chart("t", [("a", 1), ("b", 2)], "x", edges=["0", "5", "10"]))
    rects = [numbers(rect, "x", "width") for rect in svg.findall("g/rect")]
    middle = [text for text in svg.findall("text") if text.get("text-anchor") == "middle"]
    assert [text.text for text in middle] == ["0", "5", "10"]
    x = [numbers(text, "x")[0] for text in middle]
    assert x == pytest.approx([rects[0][0], rects[1][0], sum(rects[1])], abs=1.0)


def test_charts_without_anything_to_draw() -> None:
    for svg in (
        drawn(line_chart(LineChart("t", "x", ["p"], [Line("a", [None])]))),
        drawn(bar_chart("t", [("a", 0)], "x")),
    ):
        check_inside(svg)
        assert grid(svg)[-1][0] == 1.0
