"""Tables of benchmark figures for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.table import Table

Row = Mapping[str, Any]


def figure_table(
    title: str, columns: Mapping[str, str | Callable[[Row], str]], rows: Iterable[Row], *, bold: str = ""
) -> Table:
    """A table with one line per row; the first column is aligned left, all others right.

    Args:
        columns: from header to a format string over the keys of a row, or to a function of the row.
        bold: rows whose first cell is this text are bold.
    """
    table = Table(title=title, title_justify="left", title_style="bold")
    for header in columns:
        table.add_column(header, justify="right" if table.columns else "left")
    for row in rows:
        cells = [cell.format_map(row) if isinstance(cell, str) else cell(row) for cell in columns.values()]
        table.add_row(*cells, style="bold" if cells[0] == bold else None)
    return table
