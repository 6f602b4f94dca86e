"""Pages on paper and on a phone: nothing is cut off, colours are printed, the deciding columns are in view."""

from __future__ import annotations

import re
import zlib
from dataclasses import replace
from typing import Any

import pytest

from helpers.browser import OpenPage
from helpers.reports import crowded_report, some_analysis, some_comparison, some_report
from trimtab.report.html import Page

PAGES: dict[str, Page] = {
    "simulation": some_report(), "analysis": some_analysis(), "comparison": some_comparison(),
}  # fmt: skip
# Light colours of `page.css`: bars of step times, moving homes in bars of parts, experts in the timeline; the dark
# background.
QUIET, MIGRATION, EXPERTS, DARK = (0xC3, 0xC7, 0xCC), (0x3F, 0x92, 0x7A), (0x24, 0x58, 0xA8), (0x13, 0x14, 0x16)


def printed_colours(pdf: bytes) -> set[tuple[int, ...]]:
    """Fill colours of a PDF's vector graphics, as bytes."""
    found = set()
    for match in re.finditer(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL):
        try:
            content = zlib.decompress(match[1])
        except zlib.error:
            continue
        for colour in re.finditer(rb"([\d.]+) ([\d.]+) ([\d.]+) rg\b", content):
            found.add(tuple(round(255 * float(part)) for part in colour.groups()))
    return found


def begin_print(opened: OpenPage, paper: int = 703) -> None:
    """The page as a browser prints it on paper of this width in pixels; by default A4 without its margins."""
    opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    opened.page.emulate_media(media="print")
    opened.page.set_viewport_size({"width": paper, "height": 1032})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_bars_keys_and_timeline_are_printed_in_light_colours(show: Any, scheme: str) -> None:
    with show(some_report(), scheme=scheme) as opened:
        colours = printed_colours(opened.page.pdf(format="A4", print_background=False))
        assert {QUIET, MIGRATION, EXPERTS} <= colours
        assert DARK not in colours


@pytest.mark.parametrize(("width", "paper"), [(1280, 703), (390, 703), (1280, 640)])
@pytest.mark.parametrize("name", PAGES)
def test_a_print_is_complete_and_undistorted(show: Any, name: str, width: int, paper: int) -> None:
    with show(PAGES[name], width=width) as opened:
        page = opened.page
        # A browser that prints does not resize its window.
        page.add_init_script(
            "const listen = addEventListener;"
            "window.addEventListener = (name, ...more) => name === 'resize' || listen.call(window, name, ...more)"
        )
        page.reload()
        page.wait_for_selector("[data-ready]", state="attached")
        opened.wait_until_drawn()
        details = page.locator("details").count()
        assert page.locator("details[open]").count() == 0
        begin_print(opened, paper)
        assert page.locator("details[open]").count() == details
        assert page.evaluate("document.documentElement.scrollWidth") <= paper
        for width_shown, height_shown, wide, high in page.eval_on_selector_all(
            "canvas", "all => all.map(each => [each.clientWidth, each.clientHeight, each.width, each.height])"
        ):
            assert wide >= 2 * width_shown
            assert width_shown / height_shown == pytest.approx(wide / high, rel=0.02)
        cut = "all => all.filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.className)"
        assert page.eval_on_selector_all(".scroll, .lanes, section, figure", cut) == []
        assert name == "comparison" or page.locator("select").first.is_visible()
        assert page.locator("nav, button:not(.link), input, .readout, .hint").filter(visible=True).count() == 0
        page.emulate_media(media="screen")
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.locator("details[open]").count() == 0
        assert page.get_attribute("html", "data-printing") is None


def test_the_printed_timeline_has_all_rows_of_the_chosen_ranks(show: Any) -> None:
    with show(some_report(ranks=16), height=500) as opened:
        opened.page.select_option("#timeline-ranks", "all")
        hidden = "parseFloat(document.getElementById('lanes-filler').style.height)"
        assert opened.page.evaluate(hidden) > 0
        begin_print(opened)
        assert opened.page.evaluate(hidden) == 0


def test_deciding_columns_are_in_view_on_a_phone(show: Any) -> None:
    wanted = {"simulation": ("#policies", 4), "analysis": ("#placements", 3)}
    for name, (section, columns) in wanted.items():
        with show(PAGES[name], width=390, scheme="dark") as opened:
            rights = opened.page.eval_on_selector_all(
                f"{section} tr > :nth-child({columns})", "all => all.map(each => each.getBoundingClientRect().right)"
            )
            assert max(rights) <= 390
            tables = opened.page.eval_on_selector_all(".scroll", "all => all.map(each => each.clientWidth)")
            assert max(tables) <= 390
            assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("odd", [{"micro_steps": 1, "steps": 1, "layers": 1}, {"micro_steps": 3, "ranks": 2}])
def test_maps_of_small_traces_use_the_width(show: Any, odd: dict[str, Any], width: int) -> None:
    """A pointer near the right edge of a map is on the last micro-step."""
    report = some_analysis(**odd)
    last = odd["micro_steps"] - 1
    with show(report, width=width) as opened:
        for selector, readout in (("#load canvas", "#heat-readout"), ('[data-grid="vio"] canvas', "#grid-vio-readout")):
            canvas = opened.page.locator(selector)
            box = canvas.bounding_box()
            section = opened.page.locator("main").bounding_box()
            assert box["width"] > 0.95 * section["width"]
            canvas.hover(position={"x": box["width"] - 8, "y": 24})
            assert f"micro-step {last}" in opened.text(readout)


def test_long_names_do_not_widen_a_phone(show: Any) -> None:
    report, long = some_report(), "a balancer of a long name, update of micro-step 16, 8 of 48 MoE layers"
    timelines = tuple(replace(timeline, title=long) for timeline in report.timelines)
    policies = (replace(report.policies[0], name=long.replace(" ", "_")), *report.policies[1:])
    names = tuple(f"{long} {layer}" for layer in report.layer_names)
    with show(replace(report, timelines=timelines, policies=policies, layer_names=names), width=390) as opened:
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("width", [1280, 390])
def test_lanes_of_a_rank_have_distinct_names(show: Any, width: int) -> None:
    with show(crowded_report(ranks=2, layers=2), width=width) as opened:
        page = opened.page
        page.evaluate("() => { const proto = CanvasRenderingContext2D.prototype, real = proto.fillText;"
                      " window.texts = []; proto.fillText = function (text, ...rest) { window.texts.push(String(text));"
                      " return real.call(this, text, ...rest) } }")  # fmt: skip
        page.focus("#lanes")
        found = []
        for _ in range(8):
            page.keyboard.press("ArrowDown")
            found.append(re.split(r" · |, layer", opened.text("#lane-readout"))[1])
        lanes = ["compute", "compute (2)", "node link", "node link (2)"]
        assert found == [f"rank {rank}, {lane}" for rank in (0, 1) for lane in lanes]
        page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert set(lanes) <= set(page.evaluate("window.texts"))
