"""`trimtab simulate`: step time of every balancer on a cluster."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from trimtab.api.simulate import DEFAULT_POLICIES, GROUPS_MEET, SimulationResult, simulate
from trimtab.cli.options import add_trace, check_outputs, positive, progress_bar, whole
from trimtab.files import write_json
from trimtab.policies import POLICIES
from trimtab.report.perfetto import check_name, write_perfetto
from trimtab.report.simulation import timelines
from trimtab.report.tables import simulation_tables, sweep_table


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        description="Plan one step of a routing trace with several balancers, run every plan through an event "
        "simulation of the cluster, and show how long the step takes and where the time goes.",
        epilog="example: trimtab simulate out/mixed.parquet --cluster h100x8 --ranks 16 --html out/report.html; "
        f"balancers: {', '.join(POLICIES)}",
    )
    add_trace(parser)
    parser.add_argument(
        "--policies", nargs="+", choices=tuple(POLICIES), default=DEFAULT_POLICIES, metavar="NAME",
        help=f"balancers ({' '.join(DEFAULT_POLICIES)}); 'static' and 'balanced' always run",
    )  # fmt: skip
    parser.add_argument(
        "--cluster", default="h100x8", metavar="NAME", help="kind of nodes: a preset or a TOML file (h100x8)"
    )
    parser.add_argument("--model", metavar="NAME", help="a preset, config.json or checkpoint (default: as the trace)")
    parser.add_argument(
        "--ranks",
        type=positive,
        nargs="+",
        default=[16],
        metavar="N",
        help="ranks of a group; several for a sweep (16)",
    )
    parser.add_argument("--ranks-per-node", type=positive, metavar="N", help="ranks of a node (default: the cluster's)")
    parser.add_argument(
        "--slots", type=whole, nargs="+", default=[2], metavar="N", help="replicas a rank has room for (2)"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--micro-steps", type=positive, nargs="+", metavar="N", help="micro-steps of the step (8)")
    size.add_argument("--token-budget", type=positive, metavar="N", help="most tokens a rank and micro-step instead")
    parser.add_argument("--mini-batches", type=positive, default=1, metavar="N", help="optimizer steps (1)")
    parser.add_argument("--groups", type=positive, default=1, metavar="N", help="expert-parallel groups (1)")
    parser.add_argument(
        "--groups-meet", choices=GROUPS_MEET, default="step", help="where groups wait for each other (step)"
    )
    parser.add_argument(
        "--equal-terms", action="store_true", help="same homes, schedule and slots for all, instead of own recipes"
    )
    parser.add_argument(
        "--no-recompute", action="store_true", help="update alone, with the rollout's log-probabilities"
    )
    parser.add_argument("--step", type=whole, metavar="N", help="RL step of the trace (default: the last)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page to show, one file")
    parser.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="also write a micro-step's timeline (.json, .json.gz)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    check_outputs(options.json, options.html, options.perfetto)
    if options.perfetto:
        check_name(options.perfetto)
    result = _simulate(options)
    if options.json:
        write_json(options.json, result.figures())
    if options.html:
        result.write_html(options.html)
    if options.perfetto:
        write_perfetto(timelines(result.situation, result.outcomes), options.perfetto)
    console = Console(highlight=False)
    console.print(*simulation_tables(result.source, result.trace, result.situation, result.outcomes))
    if len(result.cases) > 1:
        console.print(sweep_table([(case.text, case.outcomes) for case in result.cases]))
    if options.html:
        console.print(f"page: {options.html}")
    if options.perfetto:
        console.print(f"timeline: {options.perfetto} (for the Perfetto viewer or chrome://tracing)")


def _simulate(options: argparse.Namespace) -> SimulationResult:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with progress_bar(*columns) as progress:
        task = progress.add_task("counting", total=None)
        return simulate(
            options.trace,
            policies=options.policies,
            cluster=options.cluster,
            model=options.model or None,
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
