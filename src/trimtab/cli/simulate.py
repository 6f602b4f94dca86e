"""`trimtab simulate`: step time of every balancer on a cluster."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from trimtab.api.run import Run
from trimtab.api.simulate import ALL, MAIN_POLICIES, simulate
from trimtab.cli.options import add_options
from trimtab.cli.output import compile_planners, progress_shown
from trimtab.cli.run_command import add_command, called, show
from trimtab.cli.signatures import given
from trimtab.report.sections import simulation_tables
from trimtab.report.simulation import timelines
from trimtab.report.timelines import check_name, write_perfetto

log = logging.getLogger("trimtab")
# Options with several values, which are a sweep, and others.
SWEPT = ("ranks", "slots", "micro_steps", "dispatcher")
# Balancers whose kernels take longest to compile. A second process compiles them, while this one compiles those of the
# simulator and of other balancers.
COMPILED_BESIDE = ("routepack", "trimtab")


def add(commands: Any) -> None:
    examples = ["trimtab simulate out/mixed.parquet --cluster h100x8 --ranks 16 --html out/report.html"]
    parser = add_command(commands, "simulate", simulate, run=run, examples=examples, several=(*SWEPT, "policies"))
    add_options(parser, "--perfetto", type=Path, help="write the timeline of a micro-step to FILE (.json, .json.gz)")


def run(options: argparse.Namespace) -> None:
    if options.perfetto:
        check_name(options.perfetto)
    given_names = getattr(options, "policies", MAIN_POLICIES)
    compile_planners([name for name in COMPILED_BESIDE if {name, ALL} & {*given_names}])
    fields = given(options, Run)
    swept = {name: fields.pop(name) for name in SWEPT if name in fields}
    with progress_shown() as update:
        result = called(simulate, options, run=Run(**fields).sweep(**swept), progress=update)
    if options.perfetto:
        write_perfetto(timelines(result.cases[0]), options.perfetto)
    show(options, result, *simulation_tables(result.source, result.trace, result.cases))
    if options.perfetto:
        log.info("timeline: %s (for the Perfetto viewer or chrome://tracing)", options.perfetto)
