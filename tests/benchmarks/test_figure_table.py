"""Tables of benchmark figures."""

from __future__ import annotations

from rich.console import Console

from trimtab.benchmarks.figure_table import Columns, figure_table, named_rows, scaled, with_interval


def test_cells_are_format_strings_or_functions_of_the_row() -> None:
    rows = named_rows(
        {
            "static": {"s": 1.5, "gain": 0.0, "gain_interval": [0.0, 0.0]},
            "trimtab": {"s": 0.75, "gain": 0.5, "gain_interval": [0.4, 0.6]},
        }
    )
    columns: Columns = {
        "policy": "{name}",
        "time": scaled("s", 1e3, "{:.0f} ms"),
        "gain": with_interval("gain", "{:.0%}"),
    }
    table = figure_table("Steps", columns, rows, bold="trimtab")
    assert [list(column.cells) for column in table.columns] == [
        ["static", "trimtab"], ["1500 ms", "750 ms"], ["0% [0%, 0%]", "50% [40%, 60%]"]
    ]  # fmt: skip
    assert [column.justify for column in table.columns] == ["left", "right", "right"]
    assert [row.style for row in table.rows] == [None, "bold"]
    console = Console(width=80)
    with console.capture() as printed:
        console.print(table)
    assert "Steps" in printed.get()
