"""`trimtab analyze`: what expert imbalance costs in a trace, where, and whether known routing would help."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from trimtab.api.analyze import USUAL_RANKS, AnalysisResult, analyze
from trimtab.cli.options import add_trace, check_outputs, positive, progress_bar, whole
from trimtab.files import write_json
from trimtab.report.analysis_tables import analysis_tables


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
    result = _analyze(options)
    if options.json:
        write_json(options.json, result.figures())
    if options.html:
        result.write_html(options.html)
    console = Console(highlight=False)
    for part in analysis_tables(result.report):
        console.print(part)
    if options.ranks is None:
        console.print(f"For {result.analysis.ranks} ranks, since --ranks is not given.")
    if options.html:
        console.print(f"page: {options.html}")


def _analyze(options: argparse.Namespace) -> AnalysisResult:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with progress_bar(*columns) as progress:
        task = progress.add_task("counting", total=None)
        return analyze(
            options.trace,
            ranks=options.ranks,
            ranks_per_node=options.ranks_per_node,
            token_budget=options.token_budget,
            micro_steps=options.micro_steps,
            step=options.step,
            cluster=options.cluster,
            model=options.model or None,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
