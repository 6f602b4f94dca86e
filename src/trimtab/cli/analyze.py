"""`trimtab analyze`: what expert imbalance costs in a trace, where, and whether known routing would help."""

from __future__ import annotations

import argparse
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.analysis.trace_comparison import check_comparable
from trimtab.api.analyze import AnalysisComparison, AnalysisResult, analyze
from trimtab.api.run import Run
from trimtab.cli.output import compile_planners, progress_shown
from trimtab.cli.run_command import add_command, show
from trimtab.cli.signatures import given
from trimtab.figures import plural
from trimtab.report.analysis_tables import analysis_tables
from trimtab.report.comparison_report import comparison_output
from trimtab.trace.store import open_trace

log = logging.getLogger("trimtab")
# What counts tell is said by itself if they took longer, since the rest will then, too.
SOON_S = 1.0
# Of the step whose seconds are simulated without replicas; memory is not said.
UNUSED = ("slots", "mini_batches", "sharding")


def add(commands: Any) -> None:
    examples = [
        "trimtab analyze out/mixed.parquet --ranks 16 --html out/analysis.html",
        "trimtab analyze out/math.parquet --compare out/code.parquet --html out/compared.html",
    ]
    parser = add_command(commands, "analyze", analyze, run=run, examples=examples, unused=UNUSED)
    parser.add_argument(
        "--compare", type=Path, nargs="+", metavar="FILE",
        help="another trace of the same layers and experts; the figures of both and their difference are shown "
        "(default: none)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> None:
    compile_planners(["trimtab"])
    if options.compare:
        # Before anything is counted.
        readers = [open_trace(trace) for trace in (options.trace, options.compare)]
        check_comparable([reader.name for reader in readers], [reader.empty for reader in readers])
    shown = _analyzed(options, options.trace)
    result: AnalysisResult | AnalysisComparison = shown
    tables = analysis_tables(shown.report)
    if options.compare:
        result = shown.compare(_analyzed(options, options.compare))
        tables = comparison_output(result.report)
    if "ranks" not in options:
        tables = [*tables, f"For {plural(shown.analysis.ranks, 'rank')}, since --ranks is not given."]
    show(options, result, *tables)


def _analyzed(options: argparse.Namespace, trace: list[Path]) -> AnalysisResult:
    start = time.perf_counter()

    def first(text: str) -> None:
        update("planning and simulating")
        if time.perf_counter() - start > SOON_S and not options.compare:
            log.info("%s", text)

    with progress_shown() as update:
        counted = partial(update, "counting sequences")
        run = Run(**given(options, Run))
        return analyze(tuple(trace), run, first=first, progress=counted)
