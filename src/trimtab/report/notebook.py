"""HTML of a result for a notebook: a title, a sentence and small tables, escaped, without scripts or styles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from trimtab.report.widgets import table


def notebook_html(title: str, text: str, *tables: str) -> str:
    """A title and a sentence over tables of `notebook_table`."""
    return f"<div><p><b>{escape(title)}</b><br>{escape(text)}</p>{''.join(tables)}</div>"


def notebook_table(label: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose rows begin with a name. `label` describes it to screen readers."""
    lines = [
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(value)}</td>" for value in values)}</tr>'
        for name, *values in rows
    ]
    return table(columns, lines, label)
