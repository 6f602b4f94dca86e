"""Tables, heat maps, charts and the result of a page are saved as files, without a request."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.browser import open_page
from helpers.reports import EVIL, some_analysis, some_comparison, some_report
from trimtab.analysis.trace_comparison import figures
from trimtab.files import write_json
from trimtab.report.html import write_html

SVG = "{http://www.w3.org/2000/svg}"


def saved(page: Any, button: Any, folder: Path) -> Path:
    """The file that a button saves."""
    with page.expect_download() as download:
        button.click()
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def beside(table: Any) -> Any:
    """The button below a table."""
    return table.locator("xpath=../following-sibling::button[1]")


def test_every_table_is_saved_as_it_is_shown(show: Any, tmp_path: Path) -> None:
    with show(some_report()) as opened:
        opened.page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
        tables = opened.page.locator("main table").all()
        assert len(tables) > 4
        names = set()
        for table in tables:
            path = saved(opened.page, beside(table), tmp_path)
            names.add(path.name)
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = list(csv.reader(file))
            assert rows[0] == table.locator("thead th").all_inner_texts()
            assert len(rows) == 1 + table.locator("tbody tr").count()
            figures = [row.locator("td").all_inner_texts() for row in table.locator("tbody tr").all()]
            heads = table.locator("tbody th").all_inner_texts()
            assert [row[0] for row in rows[1:]] == [text.splitlines()[0].strip() for text in heads]
            assert [row[1:] for row in rows[1:]] == [[text.strip() for text in row] for row in figures]
        assert len(names) == len(tables)
        assert all(name.endswith(".csv") for name in names)


def test_heat_maps_and_timeline_are_saved_as_pictures(show: Any, tmp_path: Path) -> None:
    with show(some_report()) as opened:
        buttons = opened.page.locator("button.save", has_text="PNG").all()
        assert len(buttons) == opened.page.locator("main figure canvas").count() > 1
        path = saved(opened.page, buttons[0], tmp_path)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.suffix == ".png"


@pytest.mark.parametrize(("scheme", "ground"), [("light", (0xFD, 0xFD, 0xFC)), ("dark", (0x13, 0x14, 0x16))])
def test_a_picture_has_the_ground_of_the_page(show: Any, tmp_path: Path, scheme: str, ground: tuple[int, ...]) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    with show(some_report(), scheme=scheme) as opened:
        path = saved(opened.page, opened.page.locator("button.save", has_text="PNG").first, tmp_path)
        with image.open(path) as picture:
            assert picture.convert("RGBA").getpixel((picture.width - 1, picture.height - 1)) == (*ground, 255)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_are_saved_with_title_legend_and_colours(show: Any, tmp_path: Path, scheme: str) -> None:
    with show(some_analysis(model=EVIL), scheme=scheme) as opened:
        buttons = opened.page.locator("button.save", has_text="SVG").all()
        assert len(buttons) == opened.page.locator("main .chart").count() == 4
        titles = [chart.inner_text() for chart in opened.page.locator("main .chart").all()]
        of_sizes = next(place for place, text in enumerate(titles) if "max_vio by size" in text)
        path = saved(opened.page, buttons[of_sizes], tmp_path)
        drawing = ElementTree.parse(path).getroot()
        texts = ["".join(text.itertext()) for text in drawing.iter(f"{SVG}text")]
        assert {"max_vio by size of micro-step, 4 ranks", "mean", "p99"} <= {*texts}
        assert not [element for element in drawing.iter() if element.tag.endswith(("script", "img"))]
        # Every visible thing has a colour that needs no style sheet, and nothing is outside of the drawing.
        styles = [line.get("style", "") for line in drawing.iter(f"{SVG}polyline")]
        assert len({style.split("stroke: ")[1].split(";")[0] for style in styles}) == 2
        assert "var(" not in "".join(styles)
        left, top, width, height = map(float, drawing.attrib["viewBox"].split())
        for item in drawing.iter(f"{SVG}text"):
            assert left <= float(item.attrib["x"]) <= left + width
            assert top < float(item.attrib["y"]) < top + height
    assert path.suffix == ".svg"


def test_the_result_is_saved_as_the_json_that_the_command_writes(browser: Any, tmp_path: Path) -> None:
    report = some_comparison(EVIL)
    content = figures(report.comparison) | {"traces": report.sources}
    write_json(tmp_path / "command.json", content)
    write_html(report, tmp_path / "page.html", content)
    with open_page(browser, tmp_path / "page.html") as opened:
        button = opened.page.locator("button.save", has_text="JSON")
        path = saved(opened.page, button, tmp_path)
        assert json.loads(path.read_text()) == json.loads((tmp_path / "command.json").read_text())
        assert path.suffix == ".json"
        assert opened.complaints == opened.requests == []


@pytest.mark.parametrize(
    ("name", "cell"),
    [("=1+1", "'=1+1"), ("+x", "'+x"), ("@SUM(A1)", "'@SUM(A1)"), ("-x", "'-x"), ("-3%", "-3%"), ('a"b,c', 'a"b,c')],
)
def test_names_are_no_formulas_for_a_spreadsheet(show: Any, tmp_path: Path, name: str, cell: str) -> None:
    report = some_report()
    policies = (replace(report.policies[0], name=name), *report.policies[1:])
    with show(replace(report, policies=policies)) as opened:
        table = opened.page.locator("#policies table").first
        path = saved(opened.page, beside(table), tmp_path)
        with path.open(encoding="utf-8-sig", newline="") as file:
            names = [row[0] for row in csv.reader(file)]
        assert any(each.removesuffix(" (fastest)").startswith(cell) for each in names), names
