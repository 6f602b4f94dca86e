"""Terminal tables for `trimtab trace info`, `trimtab plan` and `trimtab simulate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from trimtab.array_type import Array
from trimtab.planner.plan.workload import max_over_mean
from trimtab.report.simulation import answer, notes, policy_result
from trimtab.simulator import summarise_balance
from trimtab.simulator.clocks import PARTS
from trimtab.simulator.comparison import ComparisonCase, Outcome
from trimtab.trace import RoutingTrace, TraceReader
from trimtab.trace.statistics import LayerSkew

SHOWN_LAYERS = 5
# Short names of `PARTS`, so a line fits a terminal.
SHORT_PARTS = ("dense", "dispatch", "experts", "imbal.", "copies", "plan", "moves", "optim.")


def facts(rows: Iterable[tuple[str, str]], title: str) -> Table:
    """A table of names and values with a title."""
    table = Table(title=escape(title), title_justify="left", title_style="bold", show_header=False, box=None)
    for name, value in rows:
        table.add_row(name, value)
    return table


def trace_facts(reader: TraceReader, unknown_routes: int | None = None) -> Table:
    """Contents of a trace, and the size of its files. `unknown_routes` is a number of (token, layer) pairs, if
    known."""
    lengths, shape = reader.facts.lengths, reader.empty
    steps, domains = np.unique(reader.facts.steps), np.unique(reader.facts.domains[reader.facts.domains != ""])
    tokens = int(lengths.sum())
    span = f"{lengths.min()} to {lengths.max()} tokens" if len(lengths) else "no tokens"
    size = sum(file.stat().st_size for file in reader.files)
    raw = tokens * shape.num_layers * shape.top_k * shape.expert_ids.itemsize
    rows = [
        ("model", f"{escape(shape.model) or 'unknown'}: {shape.shape_text}"),
        ("sequences", f"{len(lengths):,} of {span}, {tokens:,} tokens in all"),
        ("prompt tokens", f"{int(reader.facts.prompt_lengths.sum()):,}"),
        ("RL steps", _listed([str(step) for step in steps])),
        ("domains", escape(_listed(domains.tolist())) or "not labelled"),
        ("size", f"{size / 1e6:.2f} MB; {raw / 1e6:.2f} MB of expert ids"),
    ]
    if unknown_routes is not None:
        rows.insert(5, ("unknown routes", f"{unknown_routes:,} of {tokens * shape.num_layers:,} (token, layer) pairs"))
    return facts(rows, reader.name)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def skew_table(shape: RoutingTrace, skew: LayerSkew) -> Table:
    """The most uneven layers, and the mean of all. `shape` is a (possibly empty) trace of the model."""
    table = Table(title="Most uneven layers", title_justify="left", title_style="bold")
    for column in ("decoder layer", "hottest expert / mean", "share of the busier half"):
        table.add_column(column, justify="right")
    worst = np.argsort(-skew.hottest_over_mean_L, kind="stable")[:SHOWN_LAYERS]
    for layer in worst:
        table.add_row(
            str(shape.layer_indices[layer]),
            f"{skew.hottest_over_mean_L[layer]:.2f}",
            f"{skew.busier_half_share_L[layer]:.1%}",
        )
    table.add_section()
    table.add_row("mean", f"{skew.hottest_over_mean_L.mean():.2f}", f"{skew.busier_half_share_L.mean():.1%}")
    return table


def balance_tables(trace: RoutingTrace, before_MLR: Array, after_MLR: Array) -> RenderableType:
    """max/mean of rank loads before and after planning: over all instances, and for the layers with the largest
    gain."""
    table = Table(title="Rank load, max / mean over instances", title_justify="left", title_style="bold")
    table.add_column("")
    for column in ("mean", "p50", "p99", "max"):
        table.add_column(column, justify="right")
    for name, loads_MLR in (("static", before_MLR), ("planned", after_MLR)):
        balance = summarise_balance(loads_MLR)
        table.add_row(name, *(f"{value:.3f}" for value in (balance.mean, balance.p50, balance.p99, balance.max)))
    before_L, after_L = max_over_mean(before_MLR).mean(axis=0), max_over_mean(after_MLR).mean(axis=0)
    layers = Table(title="Layers that gain most", title_justify="left", title_style="bold")
    for column in ("decoder layer", "static", "planned"):
        layers.add_column(column, justify="right")
    for layer in np.argsort(after_L - before_L, kind="stable")[:SHOWN_LAYERS]:
        layers.add_row(str(trace.layer_indices[layer]), f"{before_L[layer]:.3f}", f"{after_L[layer]:.3f}")
    return Group(table, layers)


def simulation_tables(
    source: str, trace: RoutingTrace, situation: ComparisonCase, outcomes: Mapping[str, Outcome]
) -> tuple[RenderableType, ...]:
    """The answer, the step time of every balancer, and its parts."""
    cluster = situation.cluster
    setting = facts(
        (
            ("trace", f"{trace.num_tokens:,} tokens in {trace.num_sequences:,} sequences; {trace.shape_text}"),
            ("model", situation.model.name),
            ("cluster", f"{cluster.ranks} ranks, {cluster.ranks_per_node} a node, kind {cluster.name}"),
            (
                "micro-steps",
                f"of up to {situation.token_budget:,} tokens a rank; {cluster.slots_per_rank} slots a rank",
            ),
        ),
        f"{source}, step {trace.steps[0]}",
    )
    rows = [policy_result(outcome, outcomes) for outcome in outcomes.values()]
    steps = _simulation_table(
        "Recompute and update of one step",
        ("seconds", "speed-up", "of ideal", "max/mean", "p99", "replicas", "far rows"),
    )
    for row, outcome in zip(rows, outcomes.values(), strict=True):
        steps.add_row(
            row.name,
            f"{row.step_time_s:.3f}",
            f"{row.speedup:.2f}x",
            f"{row.fraction_of_balanced:.1%}",
            f"{row.max_over_mean:.3f}",
            f"{outcome.balance.p99:.3f}",
            f"{row.replicas_per_instance:.1f}",
            f"{outcome.cross_node_fraction:.1%}",
        )
    parts = _simulation_table("Where the milliseconds go", SHORT_PARTS)
    for row in rows:
        parts.add_row(row.name, *(f"{row.parts_s[name] * 1e3:,.0f}" for name in PARTS))
    said = "\n".join(notes(trace, situation))
    return setting, steps, parts, f"[bold]{answer(situation, outcomes)}[/bold]\n{said}"


def _simulation_table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("balancer", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def sweep_table(cases: Sequence[tuple[str, Mapping[str, Outcome]]]) -> Table:
    """Speed-up over `static` of every balancer in every case."""
    names = list(cases[0][1])
    table = _simulation_table("Speed-up over static", names)
    table.columns[0].header = "case"
    for text, outcomes in cases:
        static_s = outcomes["static"].simulated.step_time_s
        table.add_row(text, *(f"{static_s / outcomes[name].simulated.step_time_s:.2f}x" for name in names))
    return table
