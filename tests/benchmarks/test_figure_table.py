"""Tables of benchmark figures."""

from __future__ import annotations

from benchmarks.tables import Columns, figure_table, named_rows, quantity, with_interval
from trimtab.report.number_text import bytes_text, seconds


def test_cells_are_format_strings_or_functions_of_the_row() -> None:
    rows = named_rows(
        {
            "static": {"s": 1.5, "megabytes": 0.25, "gain": 0.0, "gain_interval": [0.0, 0.0]},
            "trimtab": {"s": 0.00075, "megabytes": 1234.5, "gain": 0.5, "gain_interval": [0.4, 0.6]},
        }
    )
    columns: Columns = {
        "policy": "{name}",
        "time": quantity("s", seconds),
        "size": quantity("megabytes", bytes_text, 1e6),
        "gain": with_interval("gain", "{:.0%}"),
    }
    table = figure_table("Steps", columns, rows, bold="trimtab")
    assert [list(column.cells) for column in table.columns] == [
        ["static", "trimtab"], ["1.50 s", "750 µs"], ["250 kB", "1.23 GB"], ["0% [0%, 0%]", "50% [40%, 60%]"]
    ]  # fmt: skip
    assert [column.justify for column in table.columns] == ["left", "right", "right", "right"]
    assert [row.style for row in table.rows] == [None, "bold"]
    assert table.title == "Steps"
