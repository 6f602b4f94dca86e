"""Tables and pictures of benchmark figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from trimtab.array_type import Array
from trimtab.files import atomic_file

Row = Mapping[str, Any]
Cell = Callable[[Row], str]
Columns = Mapping[str, str | Cell]


def figure_table(title: str, columns: Columns, rows: Iterable[Row], *, bold: str = "", caption: str = "") -> Table:
    """A table with one line per row; the first column is aligned left, all others right.

    Args:
        columns: from header to a format string over the keys of a row, or to a function of the row.
        bold: rows whose first cell is this text are bold.
        caption: below the table.
    """
    table = Table(title=title, title_justify="left", title_style="bold", caption=caption or None)
    for header in columns:
        table.add_column(header, justify="right" if table.columns else "left")
    for row in rows:
        cells = [cell.format_map(row) if isinstance(cell, str) else cell(row) for cell in columns.values()]
        table.add_row(*cells, style="bold" if cells[0] == bold else None)
    return table


def quantity(key: str, text: Callable[[float], str], unit: float = 1.0) -> Cell:
    """A cell with a figure of the row as text, in a unit that suits its size: `quantity("median_s", seconds)`.

    Args:
        text: of `report/number_text.py`.
        unit: of the figure, in the unit that `text` takes: `quantity("ms", seconds, 1e-3)`.
    """
    return lambda row: text(row[key] * unit)


def with_interval(key: str, text: str) -> Cell:
    """A cell with a figure of the row and its interval: `with_interval("overhead", "{:+.2%}")`."""
    return lambda row: f"{text} [{text}, {text}]".format(row[key], *row[f"{key}_interval"])


def interval(key: str, text: str) -> Cell:
    """A cell with an interval of the row: `interval("overhead_interval", "{:+.1%}")`; empty if there is none."""
    return lambda row: f"{text} to {text}".format(*row[key]) if row.get(key) else ""


def named_rows(figures: Mapping[str, Row]) -> list[Row]:
    """Rows with their keys as `name`."""
    return [{"name": name, **row} for name, row in figures.items()]


@contextmanager
def picture(path: Path, rows: int, columns: int, panel: tuple[float, float], **shared: bool) -> Iterator[Array]:
    """Axes `[rows, columns]` of a picture, which is written to `path` when the context ends.

    Args:
        panel: width and height of one panel in inches.
        shared: `sharex` and `sharey` of matplotlib.
    """
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    # The same ids in every run, so that the file changes only when its figures do.
    plt.rcParams["svg.hashsalt"] = "trimtab"
    size = panel[0] * columns, panel[1] * rows
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, **shared)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    yield axes
    figure.tight_layout()
    with atomic_file(path) as file:
        figure.savefig(file, format=path.suffix.lstrip(".") or "svg", metadata={"Date": None})
    plt.close(figure)
