"""`trimtab analyze`: what expert imbalance costs in a trace, where, and whether known routing would help."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from trimtab.api.analyze import USUAL_RANKS, USUAL_RANKS_PER_NODE, AnalysisResult, analyze
from trimtab.cli.options import add_option, add_trace
from trimtab.cli.output import write_figures
from trimtab.report.analysis_tables import analysis_tables

log = logging.getLogger("trimtab")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "analyze",
        description="Print what expert imbalance costs in a routing trace, in which layers, and whether known routing "
        "would help. Nothing is planned; traces can be larger than memory.",
        examples=["trimtab analyze out/mixed.parquet --ranks 16 --html out/analysis.html"],
    )
    add_trace(parser)
    add_option(parser, "--ranks", unset=f"{USUAL_RANKS}, or the next number below that divides the experts")
    add_option(parser, "--ranks-per-node", unset=f"{USUAL_RANKS_PER_NODE}, or all")
    size = parser.add_mutually_exclusive_group()
    add_option(size, "--token-budget", unset="8192, or the longest sequence if that is more")
    add_option(size, "--micro-steps", unset="as the token budget gives")
    add_option(parser, "--step", unset="all of the trace")
    add_option(parser, "--cluster", default="h100x8")
    add_option(parser, "--model", unset="a preset like the trace")
    add_option(parser, "--json")
    add_option(parser, "--html")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    result = _analyze(options)
    console = write_figures(options, result.figures())
    if options.html:
        result.write_html(options.html)
    console.print(*analysis_tables(result.report), sep="\n")
    if options.ranks is None:
        console.print(f"For {result.analysis.ranks} ranks, since --ranks is not given.")
    if options.html:
        log.info("page: %s", options.html)


def _analyze(options: argparse.Namespace) -> AnalysisResult:
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), transient=True) as progress:
        task = progress.add_task("counting", total=None)
        return analyze(
            options.trace,
            ranks=options.ranks,
            ranks_per_node=options.ranks_per_node,
            token_budget=options.token_budget,
            micro_steps=options.micro_steps,
            step=options.step,
            cluster=options.cluster,
            model=options.model,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
