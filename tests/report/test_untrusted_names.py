"""Names from users' files are text on every kind of page: no script runs, nothing else changes, the page works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.browser import OpenPage, open_page
from helpers.comparison_cases import some_case, some_trace
from helpers.examples import examples
from helpers.hostile_names import NAMES
from helpers.reports import some_analysis, some_comparison
from trimtab.analysis.cost_estimate import CostEstimate
from trimtab.report.html import NOT_SHOWN, Page, page_of, write_html
from trimtab.report.model import AnalysisReport, Report
from trimtab.report.simulation import simulation_report
from trimtab.simulator.comparison import simulate_policy
from trimtab.simulator.simulated_case import SimulatedCase

PLAIN = "a plain name"
ALL = "".join(NAMES.values())
# What a pointer and a keyboard cause on every element, the handlers of names among them.
TOUCH_ALL = """() => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  for (const each of document.querySelectorAll("*")) {
    for (const kind of ["pointerover", "mouseover", "mouseenter", "focus", "click", "pointerleave", "blur"]) {
      each.dispatchEvent(new Event(kind, { bubbles: true }));
    }
  }
}"""
# All elements with their attributes, and all texts but scripts and their data.
CONTENT = """() => [...document.documentElement.querySelectorAll("*")].map((element) => [
  element.tagName,
  ...[...element.attributes].flatMap(({ name, value }) => (name === "style" ? [] : [name, value])),
  ...[...element.childNodes]
    .filter((node) => node.nodeType === Node.TEXT_NODE && element.tagName !== "SCRIPT")
    .map((node) => node.data),
])"""


def analysis_page(name: str) -> AnalysisReport:
    analysis = some_analysis(domains=(name, f"code, {name}"), model=name).analysis
    estimate = CostEstimate(name, name, 2.0, 1.0, 1.0, {"waiting": 1.0, "experts": 1.0}, (0.25, 0.25, 0.25, 0.25), 8)
    return AnalysisReport(f"{name}.parquet", replace(analysis, estimate=estimate))


def simulation_page(name: str) -> Report:
    case, step_s = some_case(), {"static": 2.0, "balanced": 1.0}
    case = replace(case, cluster=replace(case.cluster, name=name), model=replace(case.model, name=name))
    outcomes = {policy: simulate_policy(case, policy) for policy in step_s}
    cases = [SimulatedCase(ranks, 1, None, case, outcomes, step_s, 0.1) for ranks in (4, 2)]
    return simulation_report(f"{name}.parquet", some_trace(), cases)


PAGES: dict[str, Callable[[str], Page]] = {
    "comparison": some_comparison,
    "analysis": analysis_page,
    "simulation": simulation_page,
}


def content_after_use(opened: OpenPage) -> list[list[str]]:
    """All elements and texts, after every list, button, table and picture was used."""
    page = opened.page
    opened.wait_until_drawn()
    for select in page.locator("select").all():
        for option in range(min(3, select.locator("option").count())):
            select.select_option(index=option)
    for canvas in page.locator("canvas").all():
        canvas.focus()
        for key in ("ArrowRight", "ArrowDown", "PageDown", "n", "+"):
            page.keyboard.press(key)
    for part in page.locator("[data-figures], circle, [data-layer]").all()[:5]:
        part.hover()
    page.evaluate(TOUCH_ALL)
    content: list[list[str]] = page.evaluate(CONTENT)
    return content


@pytest.mark.longer
@pytest.mark.parametrize("name", examples(short=[ALL], long=[*NAMES.values(), ALL]))
@pytest.mark.parametrize("kind", PAGES)
def test_a_name_is_text_and_nothing_else(show: Any, kind: str, name: str) -> None:
    with show(PAGES[kind](PLAIN)) as opened:
        plain_content = content_after_use(opened)
    assert sum(PLAIN in text for element in plain_content for text in element) > 2
    with show(PAGES[kind](name)) as opened:
        content = content_after_use(opened)
        for width in (1280, 390):
            opened.page.set_viewport_size({"width": width, "height": 900})
            assert opened.page.evaluate("document.documentElement.scrollWidth") == width
    shown = NOT_SHOWN.sub("\ufffd", name)
    expected = [[text.replace(PLAIN, shown) for text in element] for element in plain_content]
    assert [[NOT_SHOWN.sub("\ufffd", text) for text in element] for element in content] == expected


def test_a_page_runs_no_script_but_its_own(browser: Any, tmp_path: Path) -> None:
    """Even if a name got into the page as HTML."""
    write_html(simulation_page(PLAIN), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text().replace(PLAIN, "<script>document.title = 'changed'</script>")
    (tmp_path / "page.html").write_text(page)
    with open_page(browser, tmp_path / "page.html") as opened:
        opened.wait_until_drawn()
        assert opened.page.locator("dd script").count() > 0
        assert opened.page.title() != "changed"
        assert all("Content Security Policy" in complaint for complaint in opened.complaints)


def test_characters_that_cannot_be_shown_are_replaced() -> None:
    """A name can't reorder the text after it, or end a line of the page's source."""
    for page_with in PAGES.values():
        page = page_of(page_with("a\u202eb\x00c\x1bd\u2028e\udcfff"))
        assert "a\ufffdb\ufffdc\ufffdd\ufffde\ufffdf" in page
        assert not NOT_SHOWN.search(page)
