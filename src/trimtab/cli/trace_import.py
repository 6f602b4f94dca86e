"""`trimtab trace import`: convert routing that a framework recorded into a routing trace."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from trimtab.api.import_dump import check_pattern, named_model, with_model
from trimtab.cli.options import add_model, add_options, add_output, given, positive
from trimtab.console import console
from trimtab.files import is_stream
from trimtab.report.tables import terminal_facts, trace_facts
from trimtab.trace import RoutingTrace, TraceReader, write_trace
from trimtab.trace.formats.bounded_import import bounded_import
from trimtab.trace.formats.importing import FORMATS, import_own_files
from trimtab.trace.formats.normalise import Summary
from trimtab.trace.formats.records import ImportOptions
from trimtab.trace.store import named_files

log = logging.getLogger("trimtab")


def add(actions: Any) -> None:
    parser = actions.add_parser(
        "import",
        help="convert routing that a framework recorded",
        description="Convert routing that an RL or serving framework recorded into a routing trace. "
        f"Formats: {', '.join(FORMATS)}.",
        examples=["trimtab trace import rollout.jsonl -o out/rollout.parquet --model qwen3-30b-a3b"],
    )
    parser.add_argument(
        "source", type=Path, nargs="+", metavar="SOURCE", help="files, folders or patterns of one dump, in order"
    )
    add_output(parser, "the trace (.parquet)")
    option = partial(add_options, parser, of=ImportOptions)
    add_options(parser, "--format", choices=tuple(FORMATS), unset="detected", help="format of the dump")
    add_model(parser, of=ImportOptions, unset="the dump's if it is known; else experts, layers and top-k as options")
    option("--num-experts", type=positive, unset="the model's", help="experts of a layer")
    option("--num-layers", "--top-k", unset="the model's")
    option("--step", unset="0, for sequences without one")
    option(
        "--step-from", type=str, metavar="NAME", unset="none",
        help="regular expression whose group is the step in a file's path, such as 'step(\\d+)'; ranks of a step may "
        "have files of their own",
    )  # fmt: skip
    option("--domain", unset="none", help="label of sequences without one")
    option("--sampled")
    add_options(
        parser, "--no-limits", action="store_false", dest="limits",
        help="for your own files: no limits of memory and processor time",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    files = named_files(options.source, "*")
    summary = Summary()
    screen = console()
    start = time.perf_counter()
    last_step = 0
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=None)

        def watched(parts: Iterable[RoutingTrace]) -> Iterator[RoutingTrace]:
            nonlocal last_step
            for part in parts:
                last_step = max(last_step, int(part.steps.max(initial=0)))
                progress.update(task, description=f"{summary.format}: {summary.tokens:,} tokens")
                yield part

        read = bounded_import if options.limits else import_own_files
        parts = read(files, options.format, _import_options(options, files), summary)
        write_trace(watched(parts), options.output)
    seconds = time.perf_counter() - start
    if not last_step and {"step", "step_from"}.isdisjoint(vars(options)):
        log.info("no step is recorded, so all sequences are of step 0; --step-from takes steps from files' names")
    if not is_stream(options.output):
        screen.print(trace_facts(TraceReader(options.output), summary.unknown_routes))
    screen.print(terminal_facts(_rows(summary, seconds), "Imported"))


def _rows(summary: Summary, seconds: float) -> list[tuple[str, str]]:
    rows = [("format", summary.format), ("time", f"{seconds:.1f} s")]
    if summary.unknown_rows:
        rows.append(("without any route", f"{summary.unknown_rows:,} tokens"))
    return rows + [("left out", f"{count:,} {what}") for what, count in summary.dropped.items()]


def _import_options(options: argparse.Namespace, files: Sequence[Path]) -> ImportOptions:
    """The options, completed by the facts of the model."""
    found = ImportOptions(**given(options, ImportOptions))
    check_pattern(found.step_from)
    return with_model(found, found.model or named_model(files, found), getattr(options, "overrides", ()))
