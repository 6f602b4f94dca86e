"""HTML of a result for a notebook: a title, a sentence and small tables, escaped, without scripts or styles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from trimtab.report.table_data import Facts, Row, TableData
from trimtab.report.widgets import table


def notebook_html(title: str, text: str, tables: Sequence[TableData]) -> str:
    """A title and a sentence over tables, whose titles are their captions."""
    shown = "".join(table(_plain(each)) for each in tables)
    return f"<div><p><b>{escape(title)}</b><br>{escape(text)}</p>{shown}</div>"


def _plain(data: TableData) -> TableData:
    """The table without bars and descriptions, which need the page's styles."""
    return replace(data, rows=tuple(Row(row.name, row.cells) for row in data.rows))


def facts_table(title: str, facts: Facts) -> TableData:
    """Names and values as a table."""
    return TableData(title, ("name", "value"), tuple(Row(name, (value,)) for name, value in facts))
