"""Terminal output: tables and facts, and what `trimtab trace info`, `plan` and `simulate` print with them."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from trimtab.array_type import Array
from trimtab.planner.plan.pass_times import PARTS
from trimtab.planner.plan.workload import max_over_mean
from trimtab.report.model import PolicyResult
from trimtab.report.number_text import bytes_text
from trimtab.report.policies_table import balance_and_replicas, by_time, policies_table
from trimtab.report.simulation import answers, notes, policy_results, setting_facts, table_title
from trimtab.report.sweep import sweep_table
from trimtab.report.table_data import Facts, Row, TableData
from trimtab.simulator import Balance, summarise_balance
from trimtab.simulator.pipeline import BUBBLE
from trimtab.simulator.simulated_case import SimulatedCase
from trimtab.trace import RoutingTrace, TraceReader
from trimtab.trace.counting import LayerSkew

SHOWN_LAYERS = 5
# Short names of `PARTS`, so a line fits a terminal.
SHORT_PARTS = ("dense", "dispatch", "experts", "imbal.", "copies", "plan", "moves", "optim.")
SHORT_PURPOSES = {
    "parameters": "params", "gradients": "grads", "optimizer state": "optim.", "gathered layers": "gathered",
    "activations": "activ.", "output head": "head", "dispatch buffers": "buffers", "replica pool": "copies",
}  # fmt: skip
# In characters: a usual terminal, and the narrowest column whose header wraps.
TERMINAL_WIDTH, NARROWEST = 80, 8
# With more cases, a sweep prints only the table of all cases.
MOST_DETAILED_CASES = 4


def facts(rows: Facts, title: str) -> Table:
    """Names and values below a title."""
    table = _table(title, show_header=False)
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    return table


def terminal_table(data: TableData) -> Table:
    """A table with its title; numbers are aligned to the right."""
    table = _table(data.title)
    for index, column in enumerate(_headers(data)):
        table.add_column(escape(column), justify="right" if index else "left", no_wrap=bool(index))
    for row in data.rows:
        table.add_row(*map(escape, (row.name, *row.cells)))
    return table


def _headers(data: TableData) -> Sequence[str]:
    """Headers of the columns; they wrap to the width of their cells if the table is wider than a terminal."""
    lines = [(row.name, *row.cells) for row in data.rows]
    cells = [max(map(len, column), default=0) for column in zip(*lines, strict=True)] or [0] * len(data.columns)
    natural = [max(len(column) + 2, width + 2) for column, width in zip(data.columns, cells, strict=True)]
    if sum(natural) - 2 <= TERMINAL_WIDTH:
        return data.columns
    return [
        fill(column, max(width, NARROWEST), break_long_words=False, break_on_hyphens=False)
        for width, column in zip(cells, data.columns, strict=True)
    ]


def _table(title: str, *, show_header: bool = True) -> Table:
    return Table(
        title=escape(title), title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False,
        min_width=len(title), show_header=show_header,
    )  # fmt: skip


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
        ("sequences", f"{len(lengths):,} of {span}, {tokens:,} tokens in all"),
        ("prompt tokens", f"{int(reader.facts.prompt_lengths.sum()):,}"),
        ("RL steps", _listed([str(step) for step in steps])),
        ("domains", _listed(domains.tolist()) or "not labelled"),
        ("size", f"{bytes_text(size)}; {bytes_text(raw)} of expert ids"),
    ]
    if unknown_routes is not None:
        rows.insert(5, ("unknown routes", f"{unknown_routes:,} of {tokens * shape.num_layers:,} (token, layer) pairs"))
    return facts(rows, reader.name)


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


def simulation_tables(source: str, trace: RoutingTrace, cases: Sequence[SimulatedCase]) -> tuple[RenderableType, ...]:
    """What `trimtab simulate` prints: the answer, all cases of a sweep, balancers by step time, memory, setting."""
    first = cases[0]
    shown: list[RenderableType]
    if len(cases) == 1:
        policies = by_time(policy_results(first))
        shown = [
            f"[bold]{escape(answers(cases))}[/bold]\n",
            terminal_table(policies_table(policies, table_title(first))),
            terminal_table(balance_and_replicas(policies)),
            terminal_table(_parts_table(policies)),
            terminal_table(_memory_table(policies)),
        ]
    else:
        shown = [f"[bold]{escape(answers(cases))}[/bold]\n", terminal_table(sweep_table(cases))]
        if len(cases) <= MOST_DETAILED_CASES:
            titles = [f"{case.text}: {table_title(case)}" for case in cases]
            pairs = zip(cases, titles, strict=True)
            shown += [terminal_table(policies_table(policy_results(case), title)) for case, title in pairs]
    shown.append(facts(setting_facts(source, trace, first), "Setting"))
    shown.append("\n".join(map(escape, notes(trace, cases))))
    return tuple(shown)


def _parts_table(policies: Sequence[PolicyResult]) -> TableData:
    bubbles = [BUBBLE] if any(BUBBLE in policy.parts_s for policy in policies) else []
    names = (*PARTS, *bubbles)
    rows = tuple(Row(policy.name, tuple(f"{policy.parts_s[name] * 1e3:,.0f}" for name in names)) for policy in policies)
    return TableData("Where the milliseconds go", ("policy", *SHORT_PARTS, *bubbles), rows)


def _memory_table(policies: Sequence[PolicyResult]) -> TableData:
    """Gigabytes of the rank that needs most. Columns have short names, so a line fits a terminal."""
    purposes = dict.fromkeys(purpose for policy in policies for purpose in policy.memory_bytes)
    rows = tuple(
        Row(policy.name, tuple(f"{policy.memory_bytes[purpose] / 1e9:,.1f}" for purpose in purposes))
        for policy in policies
    )
    columns = (SHORT_PURPOSES.get(purpose, purpose) for purpose in purposes)
    return TableData("Gigabytes of the rank that needs most", ("policy", *columns), rows)
