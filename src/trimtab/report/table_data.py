"""Tables as data: the terminal, HTML pages and notebooks render the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Facts = Sequence[tuple[str, str]]
"""Names and values, such as the settings of a run."""


@dataclass(frozen=True)
class Row:
    """A row of a table: a name and the texts of its cells. The other attributes are shown in HTML pages only.

    Attributes:
        about: description below the name.
        bar: length of a bar in the first cell, as a part of the longest; None for no bar.
        layer: MoE layer, by index, that the heat map shows when the name is chosen.
        is_ours: whether the row is Trimtab's, which is emphasised.
    """

    name: str
    cells: tuple[str, ...]
    about: str = ""
    bar: float | None = None
    layer: int | None = None
    is_ours: bool = False


@dataclass(frozen=True)
class TableData:
    """A table: a title, and columns of which the first one holds the names of the rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
