"""Tables as data: terminal, page and notebook show the same texts, escaped."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from helpers.reports import EVIL, some_policies
from trimtab.report.policies_table import balance_and_replicas, policies_table
from trimtab.report.tables import (
    SHOWN_LAYERS,
    Row,
    TableData,
    html_table,
    skew_table,
    terminal_facts,
    terminal_table,
)
from trimtab.trace import RoutingTrace
from trimtab.trace.statistics import LayerSkew


def printed(*parts: object) -> str:
    stream = StringIO()
    Console(width=200, file=stream).print(*parts)
    return stream.getvalue()


def test_terminal_and_page_show_the_same_cells() -> None:
    data = policies_table(some_policies())
    texts = (printed(terminal_table(data)), html_table(data))
    for text in texts:
        assert [cell for row in data.rows for cell in (row.name, *row.cells) if cell not in text] == []
    assert 'class="ours"' in texts[1]
    abouts = [escape(row.about) for row in data.rows]
    assert all(about in texts[1] and about not in texts[0] for about in abouts)


@pytest.mark.parametrize("rows", [(), (Row("a", ("b",)),)])
@pytest.mark.parametrize("width", [79, 80, 81, 90])
def test_headers_of_tables_that_are_wider_than_a_terminal_wrap(rows: tuple[Row, ...], width: int) -> None:
    """Two columns, with two blanks between them."""
    wide = "two words of " + "w" * (width - 20)
    table = terminal_table(TableData("title", ("first", wide), rows))
    assert ("\n" in str(table.columns[1].header)) == (width > 80)


def test_columns_without_figures_are_left_out() -> None:
    first, *others = some_policies()
    assert balance_and_replicas([first]).columns == ("policy", "max/mean", "replicas")
    some = balance_and_replicas([*others, replace(first, max_over_mean_p99=3.25)])
    cells = {row.name: row.cells[some.columns.index("p99") - 1] for row in some.rows}
    assert (cells["static"], cells["trimtab"]) == ("3.250", "–")
    assert policies_table(others).columns == ("policy", "step time", "speed-up", "of ideal")
    assert policies_table([replace(first, fraction_of_balanced=None)]).columns == ("policy", "step time", "speed-up")
    every = policies_table([replace(first, speedup_over_eplb=0.8, fits=True), *others])
    assert every.columns == ("policy", "step time", "speed-up", "fits", "over eplb", "of ideal", "memory")


def test_rows_are_sorted_by_time_and_the_fastest_that_fits_is_marked() -> None:
    policies = list(reversed(some_policies()))
    names = ["trimtab", "foremoe", "relibra", "ultraep", "llep", "eplb", "static", "balanced"]
    for table_data in (policies_table(policies), balance_and_replicas(policies)):
        assert [row.name.split()[0] for row in table_data.rows] == names
    marks = [row.name for row in policies_table(policies).rows if "(" in row.name]
    assert marks == ["trimtab (fastest)", "balanced (ideal)"]
    # The fastest does not fit.
    policies = [replace(policy, fits=policy.name != "trimtab", mark="no history" * (policy.name == "eplb"))
                for policy in policies]  # fmt: skip
    rows = policies_table(policies).rows
    marks = [row.name for row in rows if "(" in row.name]
    assert marks == ["foremoe (fastest)", "eplb (no history)", "balanced (ideal)"]
    assert [row.cells[2] for row in rows] == ["no", *["yes"] * 7]
    # None fits, or there is only one besides the ideal.
    none = policies_table([replace(policy, fits=False) for policy in policies])
    assert none.rows[0].name == "trimtab (fastest)"
    assert policies_table(policies[:2]).rows[0].name == "trimtab"


def test_markup_in_names_is_shown_as_text() -> None:
    data = TableData(EVIL, ("[red]", EVIL), (Row("[bold]name[/bold]", (EVIL,), layer=3),))
    text = printed(terminal_table(data), terminal_facts([("[i]", "[b]")], "[u]"))
    assert all(name in text for name in ("[red]", "[bold]name[/bold]", "[i]", "[b]", "[u]"))
    assert "<img" not in html_table(data)
    assert 'data-layer="3"' in html_table(data)


def test_the_most_uneven_layers_come_first() -> None:
    hottest_L = np.array([1.5, 3.25, 1.25, 2.5, 4.75, 1.0, 2.0])
    trace = RoutingTrace.from_sequences([np.zeros((1, 7, 1), int)], num_experts=2, layer_indices=range(10, 17))
    text = printed(skew_table(trace, LayerSkew(np.ones((7, 2), int), hottest_L, hottest_L / 10)))
    lines = [line.split() for line in text.splitlines()[2:]]
    assert [line[0] for line in lines] == ["14", "11", "13", "16", "10", "mean"]
    assert len(lines) == SHOWN_LAYERS + 1
    assert lines[0][1:] == ["4.75", "47.5%"]


def test_names_of_rows_are_whole_in_a_usual_terminal() -> None:
    """Wide headers wrap, in tables that are wider than a terminal alone."""
    columns = ("policy", "step time", "moves left out", *(f"part {number} of ideal" for number in range(5)))
    rows = tuple(Row(name, ("18.948 s",) * 7) for name in ("eplb", "eplb_oracle"))
    stream = StringIO()
    Console(width=80, file=stream).print(
        terminal_table(TableData("Wide", columns[:6], tuple(replace(row, cells=row.cells[:5]) for row in rows)))
    )
    assert [row.name for row in rows if row.name not in stream.getvalue()] == []
    narrow = terminal_table(TableData("Narrow", columns[:3], tuple(replace(row, cells=row.cells[:2]) for row in rows)))
    assert "moves left out" in printed(narrow)
