"""`trimtab analyze`: what expert imbalance costs in a trace, where, and whether known routing would help."""

from __future__ import annotations

import argparse
import logging
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from trimtab.api.analyze import analyze
from trimtab.api.steps import DISPATCHERS, MOST_STEPS
from trimtab.cli.options import (
    DEFAULT_RANKS,
    DEFAULT_SIZE,
    add_layout,
    add_model,
    add_options,
    add_settings,
    add_trace,
    given,
    need_extra,
    positive,
)
from trimtab.cli.output import write_figures
from trimtab.report.analysis_tables import analysis_tables
from trimtab.report.imbalance import FORMATS

log = logging.getLogger("trimtab")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "analyze",
        description="Print what expert imbalance costs in a routing trace, in which layers, and whether known routing "
        "would help. Nothing is planned; traces can be larger than memory.",
        examples=[
            "trimtab analyze out/mixed.parquet --ranks 16 --html out/analysis.html",
            "trimtab analyze out/mixed.parquet --ranks 16 --figures out/figures --format svg",
        ],
    )
    add_trace(parser)
    add_settings(parser)
    option = partial(add_options, parser, of=analyze)
    option("--ranks", unset=DEFAULT_RANKS)
    option("--ranks-per-node", unset="the cluster's")
    size = partial(add_options, parser.add_mutually_exclusive_group(), of=analyze)
    size("--token-budget", unset=DEFAULT_SIZE)
    size("--micro-steps", unset="as the token budget gives")
    option("--step", unset="all of the trace")
    option("--steps", unset=f"all but the trace's first, at most {MOST_STEPS}; for seconds")
    scale = partial(add_options, parser.add_mutually_exclusive_group(), of=analyze)
    scale("--step-tokens", "--sampled", unset="the trace's")
    option("--groups", type=positive, help="expert-parallel groups, for seconds")
    add_layout(parser, of=analyze)
    option("--cluster")
    option("--dispatcher", choices=tuple(DISPATCHERS), unset="the cluster's", help="what is sent to a node")
    option("--no-recompute", action="store_false", dest="recompute", help="update alone, for seconds")
    add_model(parser, of=analyze, unset="the trace's, else a preset like the trace")
    option("--jobs", type=positive, help="local processes that count")
    add_options(parser, "--json", "--html")
    add_options(parser, "--figures", type=Path, metavar="FOLDER", help="write pictures for a paper into FOLDER")
    add_options(parser, "--format", choices=FORMATS, default="pdf", help="of the pictures")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    if options.figures:
        need_extra("matplotlib", extra="plot")
    with Progress(transient=True) as progress:
        update = partial(progress.update, progress.add_task("counting", total=None))
        result = analyze(**given(options, analyze), progress=lambda done, total: update(completed=done, total=total))
    console = write_figures(options, result.figures())
    if options.html:
        result.write_html(options.html)
    if options.figures:
        result.write_figures(options.figures, options.format)
    console.print(*analysis_tables(result.report), sep="\n")
    if "ranks" not in options:
        console.print(f"For {result.analysis.ranks} ranks, since --ranks is not given.")
    if options.html:
        log.info("page: %s", options.html)
    if options.figures:
        log.info("pictures: %s", options.figures)
