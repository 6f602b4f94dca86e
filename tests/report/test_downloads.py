"""Tables and heat maps of a page are saved as files, without a request, and safe for a spreadsheet."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.reports import some_report


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
