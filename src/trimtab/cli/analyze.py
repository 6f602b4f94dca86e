"""`trimtab analyze`: is imbalance costing me, where, and would foresight help?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from trimtab.analysis import CountedTrace, analyze, count_trace
from trimtab.analysis.analysis import figures
from trimtab.cli.options import add_trace, check_model, check_outputs, positive, progress_bar, whole, write_json
from trimtab.cluster import ModelSpec, load_cluster, load_model, model_like
from trimtab.errors import InputError
from trimtab.report.analysis_tables import analysis_tables
from trimtab.report.content import AnalysisReport
from trimtab.report.html import write_html
from trimtab.trace import RoutingTrace, TraceReader

USUAL_RANKS = 8
USUAL_RANKS_PER_NODE = 8


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "analyze",
        description="Say what expert imbalance costs in a routing trace, where, and whether foresight would help. "
        "Nothing is planned; traces larger than memory are fine.",
        epilog="example: trimtab analyze out/mixed.parquet --ranks 16 --html out/analysis.html",
    )
    add_trace(parser)
    parser.add_argument("--ranks", type=positive, metavar="N", help=f"ranks of a group ({USUAL_RANKS})")
    parser.add_argument("--ranks-per-node", type=positive, metavar="N", help="ranks that share a node (8, or all)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--token-budget",
        type=positive,
        metavar="N",
        help="most tokens a rank and micro-step (8192, or more if need be)",
    )
    size.add_argument("--micro-steps", type=positive, metavar="N", help="micro-steps of a step instead")
    parser.add_argument("--step", type=whole, metavar="N", help="RL step of the trace (default: all)")
    parser.add_argument(
        "--cluster",
        default="h100x8",
        metavar="NAME",
        help="kind of nodes, for seconds: a preset or a TOML file (h100x8)",
    )
    parser.add_argument("--model", metavar="NAME", help="a preset, config.json or checkpoint (default: as the trace)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page to show, one file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    check_outputs(options.json, options.html)
    reader = TraceReader(options.trace)
    ranks = _ranks(reader.empty, options.ranks, reader.name)
    per_node = options.ranks_per_node or (USUAL_RANKS_PER_NODE if ranks % USUAL_RANKS_PER_NODE == 0 else ranks)
    cluster = load_cluster(options.cluster, ranks=ranks, slots_per_rank=0, ranks_per_node=per_node)
    model = _model(reader.empty, options.model, reader.name)
    console = Console(highlight=False)
    counted = _count(reader, ranks, options)
    analysis = analyze(counted, ranks=ranks, ranks_per_node=per_node, cluster=cluster if model else None, model=model)
    report = AnalysisReport(reader.name, analysis)
    if options.json:
        write_json(
            options.json,
            {"schema": "trimtab-analyze-1", "trace": [str(file) for file in reader.files]} | figures(analysis),
        )
    if options.html:
        write_html(report, options.html)
    for part in analysis_tables(report):
        console.print(part)
    if options.ranks is None:
        console.print(f"For {ranks} ranks, since --ranks is not given.")
    if options.html:
        console.print(f"page: {options.html}")


def _count(reader: TraceReader, ranks: int, options: argparse.Namespace) -> CountedTrace:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with progress_bar(*columns) as progress:
        task = progress.add_task("counting", total=None)
        return count_trace(
            reader,
            ranks=ranks,
            token_budget=options.token_budget,
            micro_steps=options.micro_steps,
            step=options.step,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )


def _ranks(empty: RoutingTrace, asked: int | None, name: str) -> int:
    """As asked, or the usual number, or the largest below that divides the experts."""
    if asked is None:
        return max(ranks for ranks in range(1, USUAL_RANKS + 1) if empty.num_experts % ranks == 0)
    if empty.num_experts % asked:
        divisors = [str(ranks) for ranks in range(1, empty.num_experts + 1) if empty.num_experts % ranks == 0]
        raise InputError(
            f"--ranks {asked} doesn't divide the {empty.num_experts} experts of {name}; "
            f"use one of {', '.join(divisors)}"
        )
    return asked


def _model(empty: RoutingTrace, asked: str | None, name: str) -> ModelSpec | None:
    """The model to price with. One that is asked for must fit; one that is guessed may be none."""
    if asked is None:
        try:
            model = model_like(empty.num_experts, empty.top_k, empty.num_layers)
        except InputError:
            return None
        return model if empty.num_layers <= model.moe_layers else None
    model = load_model(asked)
    check_model(name, empty, model)
    return model
