"""`trimtab simulate`: step time of every balancer on a cluster."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trimtab.api.simulate import DEFAULT_MICRO_STEPS, DEFAULT_POLICIES, GROUPS_MEET, SimulationResult, simulate
from trimtab.cli.options import add_option, add_trace, positive
from trimtab.cli.output import write_figures
from trimtab.policies import POLICIES
from trimtab.report.perfetto import check_name, write_perfetto
from trimtab.report.simulation import timelines
from trimtab.report.tables import simulation_tables, sweep_table

log = logging.getLogger("trimtab")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        description="Plan one step of a routing trace with several balancers, estimate the step time of every plan "
        "with a timeline model of the cluster, and print where the time goes. static and balanced always run. Several "
        "values of --ranks, --slots or --micro-steps are a sweep.",
        examples=["trimtab simulate out/mixed.parquet --cluster h100x8 --ranks 16 --html out/report.html"],
    )
    add_trace(parser)
    policies = tuple(POLICIES)
    add_option(parser, "--policy", nargs="+", dest="policies", choices=policies, default=DEFAULT_POLICIES)
    add_option(parser, "--cluster", default="h100x8")
    add_option(parser, "--model", unset="a preset like the trace")
    add_option(parser, "--ranks", nargs="+", default=[16])
    add_option(parser, "--ranks-per-node", unset="the cluster's")
    add_option(parser, "--slots", nargs="+", default=[2])
    size = parser.add_mutually_exclusive_group()
    add_option(size, "--micro-steps", nargs="+", unset=DEFAULT_MICRO_STEPS)
    add_option(size, "--token-budget", unset="as --micro-steps gives")
    add_option(parser, "--mini-batches", default=1)
    add_option(parser, "--groups", type=positive, default=1, help="expert-parallel groups")
    add_option(parser, "--groups-meet", choices=GROUPS_MEET, default="step", help="where groups wait for each other")
    add_option(
        parser, "--equal-terms", action="store_true", help="same homes, schedule and slots for all, not own recipes"
    )
    add_option(parser, "--no-recompute", action="store_true", help="update alone, with the rollout's log-probabilities")
    add_option(parser, "--step", unset="the last of the trace")
    add_option(parser, "--json")
    add_option(parser, "--html")
    add_option(parser, "--perfetto", type=Path, help="write the timeline of a micro-step to FILE (.json, .json.gz)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    if options.perfetto:
        check_name(options.perfetto)
    result = _simulate(options)
    console = write_figures(options, result.figures())
    if options.html:
        result.write_html(options.html)
    if options.perfetto:
        write_perfetto(timelines(result.situation, result.outcomes), options.perfetto)
    console.print(*simulation_tables(result.source, result.trace, result.situation, result.outcomes))
    if len(result.cases) > 1:
        console.print(sweep_table([(case.text, case.outcomes) for case in result.cases]))
    if options.html:
        log.info("page: %s", options.html)
    if options.perfetto:
        log.info("timeline: %s (for the Perfetto viewer or chrome://tracing)", options.perfetto)


def _simulate(options: argparse.Namespace) -> SimulationResult:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("counting", total=None)
        return simulate(
            options.trace,
            policies=options.policies,
            cluster=options.cluster,
            model=options.model,
            ranks=options.ranks,
            ranks_per_node=options.ranks_per_node,
            slots=options.slots,
            micro_steps=options.micro_steps,
            token_budget=options.token_budget,
            mini_batches=options.mini_batches,
            groups=options.groups,
            groups_meet=options.groups_meet,
            equal_terms=options.equal_terms,
            recompute=not options.no_recompute,
            step=options.step,
            progress=lambda name, done, total: progress.update(task, description=name, completed=done, total=total),
        )
