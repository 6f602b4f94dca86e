"""`trimtab simulate`: step time of every balancer on a cluster."""

from __future__ import annotations

import argparse
import logging
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.api.arguments import GROUPS_MEET
from trimtab.api.simulate import ALL, MAIN_POLICIES, simulate
from trimtab.api.steps import MOST_STEPS
from trimtab.cli.options import add_options, given
from trimtab.cli.output import compile_planners, progress_shown, write_figures
from trimtab.cli.run_options import add_run, add_simulated_steps
from trimtab.cluster.parallel_layout import SHARDINGS
from trimtab.policies import POLICIES
from trimtab.report.sections import simulation_tables
from trimtab.report.simulation import timelines
from trimtab.report.timelines import check_name, write_perfetto

log = logging.getLogger("trimtab")
# Balancers whose kernels take longest to compile. A second process compiles them, while this one compiles those of the
# simulator and of other balancers.
COMPILED_BESIDE = ("routepack", "trimtab")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        description="Plan steps of a routing trace with several balancers, estimate the step time of every plan "
        "with a timeline model of the cluster, and print where the time goes and whether memory is enough. By default "
        "static, eplb, trimtab and the ideal (balanced) run. Several values of --ranks, --slots, --micro-steps or "
        "--dispatcher are a sweep.",
        examples=["trimtab simulate out/mixed.parquet --cluster h100x8 --ranks 16 --html out/report.html"],
    )
    add_run(parser, of=simulate, is_sweep=True)
    add_simulated_steps(parser, of=simulate, most=MOST_STEPS)
    option = partial(add_options, parser, of=simulate)
    option("--policy", nargs="+", dest="policies", choices=(*POLICIES, ALL), unset=" ".join(MAIN_POLICIES))
    option("--slots", nargs="+")
    option("--mini-batches")
    option("--groups-meet", choices=GROUPS_MEET, help="where groups wait for each other")
    option("--equal-terms", action="store_true", help="same homes, schedule and slots for all, not own recipes")
    option("--sharding", choices=SHARDINGS, help="training state that data ranks share out")
    option("--sensitivity", action="store_true", help="the five best again, with what the price may lack")
    add_options(parser, "--json", "--html")
    add_options(parser, "--perfetto", type=Path, help="write the timeline of a micro-step to FILE (.json, .json.gz)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    if options.perfetto:
        check_name(options.perfetto)
    given_names = getattr(options, "policies", MAIN_POLICIES)
    compile_planners([name for name in COMPILED_BESIDE if {name, ALL} & {*given_names}])
    with progress_shown() as update:
        result = simulate(**given(options, simulate), progress=update)
    console = write_figures(options, result.figures())
    if options.html:
        result.write_html(options.html)
    if options.perfetto:
        write_perfetto(timelines(result.cases[0]), options.perfetto)
    console.print(*simulation_tables(result.source, result.trace, result.cases), sep="\n")
    if options.html:
        log.info("page: %s", options.html)
    if options.perfetto:
        log.info("timeline: %s (for the Perfetto viewer or chrome://tracing)", options.perfetto)
