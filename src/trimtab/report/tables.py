"""Tables as data, and as text of a terminal, HTML of pages; tables of traces and plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from textwrap import fill

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape as marked
from rich.table import Table

from trimtab.array_type import Array
from trimtab.figures import plural
from trimtab.planner.plan.workload import max_over_mean
from trimtab.report.number_text import NONE, bytes_text
from trimtab.simulator import Balance, summarise_balance
from trimtab.trace import RoutingTrace, TraceReader
from trimtab.trace.statistics import LayerSkew

SHOWN_LAYERS = 5
# In characters: a usual terminal, and the narrowest column whose header wraps.
TERMINAL_WIDTH, NARROWEST = 80, 8


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


def first_lines(assumed: str) -> list[RenderableType]:
    """What was assumed, above an answer; empty if nothing was."""
    return [marked(assumed)] if assumed else []


def terminal_facts(rows: Facts, title: str) -> Table:
    """Names and values below a title."""
    table = _table(title, show_header=False)
    for name, value in rows:
        table.add_row(marked(name), marked(value))
    return table


def terminal_table(data: TableData) -> Table:
    """A table with its title; numbers are aligned to the right."""
    table = _table(data.title)
    for index, column in enumerate(_headers(data)):
        table.add_column(marked(column), justify="right" if index else "left", no_wrap=bool(index))
    for row in data.rows:
        table.add_row(*map(marked, (row.name, *row.cells)))
    return table


def _headers(data: TableData) -> Sequence[str]:
    """Headers of the columns; they wrap to the width of their cells if the table is wider than a terminal."""
    lines = [(row.name, *row.cells) for row in data.rows]
    cells = [max(map(len, column)) for column in zip(*lines, strict=True)] or [0] * len(data.columns)
    natural = [max(len(column) + 2, width + 2) for column, width in zip(data.columns, cells, strict=True)]
    if sum(natural) - 2 <= TERMINAL_WIDTH:
        return data.columns
    return [
        fill(column, max(width, NARROWEST), break_long_words=False, break_on_hyphens=False)
        for width, column in zip(cells, data.columns, strict=True)
    ]


def _table(title: str, *, show_header: bool = True) -> Table:
    return Table(
        title=marked(title), title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False,
        min_width=len(title), show_header=show_header,
    )  # fmt: skip


def without_empty_columns(data: TableData) -> TableData:
    """The table without columns that have no figure in any row."""
    kept = [index for index in range(len(data.columns) - 1) if any(row.cells[index] != NONE for row in data.rows)]
    rows = tuple(replace(row, cells=tuple(row.cells[index] for index in kept)) for row in data.rows)
    return TableData(data.title, (data.columns[0], *(data.columns[index + 1] for index in kept)), rows)


def html_table(data: TableData) -> str:
    """A table with its title as caption, in a box of its own, which scrolls on a narrow page."""
    title = escape(data.title)
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in data.columns)
    rows = "".join(map(_html_row, data.rows))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table: {title}"><table>'
        f"<caption><b>{title}</b></caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _html_row(row: Row) -> str:
    name = escape(row.name)
    if row.layer is not None:
        name = f'<button type="button" class="link" data-layer="{row.layer}">{name}</button>'
    about = f'<span class="about">{escape(row.about)}</span>' if row.about else ""
    cells = [f"<td>{escape(cell)}</td>" for cell in row.cells]
    if row.bar is not None:
        bar = f'<i style="width:{100 * row.bar:.2f}%"></i><span>{escape(row.cells[0])}</span>'
        cells[0] = f'<td class="with-bar"><span class="amount">{bar}</span></td>'
    ours = ' class="ours"' if row.is_ours else ""
    return f'<tr{ours}><th scope="row">{name}{about}</th>{"".join(cells)}</tr>'


def trace_facts(reader: TraceReader, unknown_routes: int | None = None) -> Table:
    """Contents of a trace, and the size of its files. `unknown_routes` counts (token, layer) pairs; None if unknown."""
    lengths, shape = reader.facts.lengths, reader.empty
    steps, domains = np.unique(reader.facts.steps), np.unique(reader.facts.domains[reader.facts.domains != ""])
    tokens = int(lengths.sum())
    span = f"{lengths.min()} to {lengths.max()} tokens" if len(lengths) else "no tokens"
    size = sum(file.stat().st_size for file in reader.files)
    raw = tokens * shape.num_layers * shape.top_k * shape.expert_ids.itemsize
    rows = [
        ("model", f"{shape.model or 'unknown'}: {shape.shape_text}"),
        ("sequences", f"{len(lengths):,} of {span}, {plural(tokens, 'token')} in all"),
        ("prompt tokens", f"{int(reader.facts.prompt_lengths.sum()):,}"),
        ("RL steps", _listed([str(step) for step in steps])),
        ("domains", _listed(domains.tolist()) or "not labelled"),
        ("size", f"{bytes_text(size)}; {bytes_text(raw)} of expert ids"),
    ]
    if unknown_routes is not None:
        rows.insert(5, ("unknown routes", f"{unknown_routes:,} of {tokens * shape.num_layers:,} (token, layer) pairs"))
    if shape.numbering and shape.numbering.first:
        rows.append(("numbering", f"of a checkpoint renumbered in {plural(len(shape.numbering.first), 'layer')}"))
    return terminal_facts(rows, reader.name)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def skew_table(shape: RoutingTrace, skew: LayerSkew) -> Table:
    """The most uneven layers, and the mean of all. `shape` is a (possibly empty) trace of the model."""

    def row(name: str, hottest: float, share: float) -> Row:
        return Row(name, (f"{hottest:.2f}", f"{share:.1%}"))

    hottest_L, share_L = skew.hottest_over_mean_L, skew.busier_half_share_L
    worst = np.argsort(-hottest_L, kind="stable")[:SHOWN_LAYERS]
    rows = [row(str(shape.layer_indices[layer]), hottest_L[layer], share_L[layer]) for layer in worst]
    rows.append(row("mean of all", hottest_L.mean(), share_L.mean()))
    columns = ("decoder layer", "hottest expert / mean", "tokens of the busier half")
    return terminal_table(TableData("Most uneven layers", columns, tuple(rows)))


def balance_tables(trace: RoutingTrace, before_MLR: Array, after_MLR: Array) -> RenderableType:
    """max/mean of rank loads `[M, L, R]` before and after planning, and the layers with the largest gain."""
    before_L, after_L = max_over_mean(before_MLR).mean(axis=0), max_over_mean(after_MLR).mean(axis=0)
    layers = tuple(
        Row(str(trace.layer_indices[layer]), (f"{before_L[layer]:.3f}", f"{after_L[layer]:.3f}"))
        for layer in np.argsort(after_L - before_L, kind="stable")[:SHOWN_LAYERS]
    )
    return Group(
        terminal_table(plan_balance_table(summarise_balance(before_MLR), summarise_balance(after_MLR))),
        terminal_table(TableData("Layers that gain most", ("decoder layer", "static", "planned"), layers)),
    )


def plan_balance_table(before: Balance, after: Balance) -> TableData:
    """max/mean of rank loads without and with a plan."""
    rows = tuple(
        Row(name, tuple(f"{value:.3f}" for value in (balance.mean, balance.p50, balance.p99, balance.max)))
        for name, balance in (("static", before), ("planned", after))
    )
    return TableData("Rank load, max/mean over instances", ("homes", "mean", "p50", "p99", "max"), rows)
