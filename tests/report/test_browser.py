"""The page in a headless Chromium: it draws, reacts to pointer and keyboard, and makes no network request."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.reports import edge_reports, some_report

MAPS = "#load figure:nth-child({}) canvas"


def test_all_sections_are_drawn_without_network_requests(show: Any) -> None:
    with show(some_report()) as opened:
        opened.page.locator("#step-timeline").scroll_into_view_if_needed()
        for section in ("policies", "time", "load", "step-timeline", "layers", "memory", "setting", "notes"):
            assert opened.page.locator(f"#{section} h2").is_visible()
        assert [table.locator("tbody tr").count() for table in opened.page.locator("#policies table").all()] == [8, 8]
        assert opened.page.locator("#time .bar").count() == 8
        drawn = [opened.pixels(MAPS.format(1)), opened.pixels(MAPS.format(2)), opened.pixels("#lanes")]
        assert len(set(drawn)) == 3


def test_list_slider_buttons_and_table_choose_the_layer(show: Any) -> None:
    with show(some_report()) as opened:
        page, shown = opened.page, MAPS.format(1)
        pictures = {}
        for value in ("-1", "0", "1", "2", "3"):
            page.select_option("#layer", value)
            pictures[value] = opened.pixels(shown)
            assert page.input_value("#layer-slider") == value
        assert len(set(pictures.values())) == 5
        assert page.is_disabled("#layer-next")
        page.click("#layer-previous")
        assert opened.pixels(shown) == pictures["2"]
        page.focus("#layer-slider")
        page.keyboard.press("ArrowLeft")
        assert opened.pixels(shown) == pictures["1"]
        page.click("#layers tbody tr:nth-child(1) button")
        worst = page.get_attribute("#layers tbody tr:nth-child(1) button", "data-layer")
        assert page.input_value("#layer") == worst


def test_pointer_and_keys_show_the_figures_of_a_cell(show: Any) -> None:
    report = some_report()
    with show(some_report()) as opened:
        page = opened.page
        page.select_option("#layer", "2")
        page.focus(MAPS.format(1))
        for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
            page.keyboard.press(key)
        by_key = opened.text("#heat-readout")
        figures = []
        for part in (report.before, report.after):
            loads = part.loads_MLR[1, 2]
            figures.append(f"{part.title} {loads[1] / loads.mean():.2f}× the mean ({loads[1]:,} tokens)")
        assert by_key == " · ".join(["Rank 1, micro-step 1", *figures])
        page.hover(MAPS.format(2), position={"x": 40, "y": 20 + 36 * 7 + 18})
        assert opened.text("#heat-readout").startswith("Rank 7, micro-step 0 · ")
        page.focus(MAPS.format(2))
        page.keyboard.press("PageDown")
        assert page.input_value("#layer") == "3"


def test_the_timeline_reacts_to_keys_wheel_drag_and_lists(show: Any) -> None:
    with show(some_report()) as opened:
        page = opened.page
        page.locator("#step-timeline").scroll_into_view_if_needed()
        page.focus("#lanes")
        seen = [opened.pixels("#lanes")]

        def changes() -> None:
            page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            seen.append(opened.pixels("#lanes"))
            assert seen[-1] != seen[-2]

        for key, told in (("ArrowDown", "attention · rank 0, compute"), ("ArrowDown", "dispatch · rank 0, node link")):
            page.keyboard.press(key)
            changes()
            assert opened.text("#lane-readout").startswith(f"{told}, layer 0 · ")
        for key in ("n", "p", "+", "ArrowRight", "ArrowLeft", "-", "+", "0"):
            page.keyboard.press(key)
            changes()
        box = page.locator("#lanes").bounding_box()
        page.mouse.move(box["x"] + 400, box["y"] + 31)
        page.keyboard.down("Control")
        page.mouse.wheel(0, -300)
        page.keyboard.up("Control")
        changes()
        page.mouse.down()
        page.mouse.move(box["x"] + 250, box["y"] + 31, steps=3)
        page.mouse.up()
        changes()
        page.select_option("#timeline", "1")
        changes()
        page.select_option("#timeline-ranks", "5")
        changes()
        page.keyboard.press("Tab")
        page.click("#zoom-in")
        changes()


def test_bars_show_the_figures_of_a_part(show: Any) -> None:
    with show(some_report()) as opened:
        page = opened.page
        page.hover("#time .bar-row:nth-of-type(1) .bar span:nth-child(3)")
        # The fastest is first.
        expected = "trimtab, experts, if all ranks had the same load · 1.60 s, 39.2%"
        assert opened.text("#time .readout") == expected
        page.mouse.move(0, 0)
        page.locator("#time .bar").first.focus()
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        assert opened.text("#time .readout") == expected


def test_tab_reaches_every_control_with_a_visible_focus(show: Any) -> None:
    with show(some_report()) as opened:
        page = opened.page
        page.locator("#step-timeline").scroll_into_view_if_needed()
        page.evaluate("scrollTo(0, 0)")
        reached = []
        for _ in range(90):
            page.keyboard.press("Tab")
            name, outline = page.evaluate(
                "() => { const e = document.activeElement;"
                " return [e.id || e.className || e.tagName, getComputedStyle(e).outlineStyle] }"
            )
            if name == "BODY":
                break
            assert outline != "none", name
            reached.append(name)
        wanted = {"skip", "theme", "layer", "layer-slider", "layer-next", "lanes", "timeline", "timeline-ranks", "bar"}
        assert wanted | {"zoom-in", "zoom-out", "zoom-fit", "scroll", "link"} <= set(reached)
        assert reached[0] == "skip"


def test_light_dark_and_phone_layouts_differ_and_fit(show: Any) -> None:
    looks: dict[str, bytes] = {}
    for name, scheme, width in (("light", "light", 1280), ("dark", "dark", 1280), ("phone", "light", 390)):
        with show(some_report(), scheme=scheme, width=width) as opened:
            page = opened.page
            page.locator("#step-timeline").scroll_into_view_if_needed()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            for section in page.locator("section").all():
                box = section.bounding_box()
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= width
            page.evaluate("scrollTo(0, 0)")
            looks[name] = page.screenshot()
            if name == "light":
                before = opened.pixels(MAPS.format(1))
                page.click("#theme")
                page.click("#theme")
                assert page.get_attribute("html", "data-theme") == "dark"
                assert opened.pixels(MAPS.format(1)) != before
                assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(19, 20, 22)"
    assert len(set(looks.values())) == 3


def test_a_browser_that_cannot_unpack_is_told(show: Any) -> None:
    with show(some_report()) as opened:
        opened.page.add_init_script("delete window.DecompressionStream")
        opened.page.reload()
        opened.page.wait_for_selector("[data-ready]", state="attached")
        assert "need a browser of 2023 or later" in opened.text(".note")
        assert opened.page.locator("#policies tr.ours").first.is_visible()


@pytest.mark.parametrize("name", edge_reports())
def test_small_and_unusual_reports_are_shown(show: Any, name: str) -> None:
    with show(edge_reports()[name], width=390) as opened:
        page = opened.page
        if page.locator("#step-timeline").count():
            page.locator("#step-timeline").scroll_into_view_if_needed()
            page.focus("#lanes")
            for key in ("ArrowDown", "n", "+", "ArrowRight", "0"):
                page.keyboard.press(key)
        if page.locator("#load").count():
            page.focus(MAPS.format(1))
            for key in ("ArrowRight", "ArrowDown", "PageDown", "PageUp"):
                page.keyboard.press(key)
            assert "NaN" not in opened.text("#load")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
