"""`trimtab advise`: what to do about imbalance on a cluster."""

from __future__ import annotations

import argparse
import logging
from functools import partial
from typing import Any

from rich.progress import Progress

from trimtab.api.advise import MOST_STEPS, advise
from trimtab.api.steps import DISPATCHERS
from trimtab.cli.options import (
    DEFAULT_RANKS,
    DEFAULT_SIZE,
    add_layout,
    add_model,
    add_options,
    add_settings,
    add_trace,
    given,
    positive,
)
from trimtab.cli.output import write_figures
from trimtab.cluster.parallel_layout import SHARDINGS
from trimtab.report.advice import advice_output

log = logging.getLogger("trimtab")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "advise",
        description="Compare what a training run can do about imbalance on a cluster (nothing, packing, moving "
        "experts, EPLB, live and planned replicas), and advise one: seconds with intervals, GPU hours, memory, what it "
        "needs, and settings to copy. Traces that have a part of each step are scaled to the step.",
        examples=[
            "trimtab advise out/rollout.parquet --cluster h100x8 --ranks 16 --step-tokens 20M --gpu-hour 2.50",
            "trimtab advise out/rollout.parquet --ranks 16 --groups 8 --sampled 0.05 --html out/advice.html",
        ],
    )
    add_trace(parser)
    add_settings(parser)
    option = partial(add_options, parser, of=advise)
    option("--cluster")
    add_model(parser, of=advise, unset="the trace's, else a preset like the trace")
    option("--ranks", unset=DEFAULT_RANKS)
    option("--ranks-per-node", unset="the cluster's")
    option("--groups", type=positive, help="expert-parallel groups")
    option("--slots")
    size = partial(add_options, parser.add_mutually_exclusive_group(), of=advise)
    size("--micro-steps", unset="as the token budget gives")
    size("--token-budget", unset=DEFAULT_SIZE)
    scale = partial(add_options, parser.add_mutually_exclusive_group(), of=advise)
    scale("--step-tokens", "--sampled", unset="the trace's")
    option("--dispatcher", choices=tuple(DISPATCHERS), unset="the cluster's", help="what is sent to a node")
    option("--mini-batches")
    option("--no-recompute", action="store_false", dest="recompute", help="update alone")
    option("--sharding", choices=SHARDINGS, help="training state that data ranks share out")
    add_layout(parser, of=advise)
    option("--step", unset="the last of the trace")
    option("--steps", unset=f"all but the trace's first, at most {MOST_STEPS}")
    option("--gpu-hour", unset="no money")
    option("--draws", type=positive, help="drawings of steps of which a part was recorded")
    add_options(parser, "--json", "--html")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    with Progress(transient=True) as progress:
        update = partial(progress.update, progress.add_task("counting", total=None))
        result = advise(
            **given(options, advise),
            first=lambda text: log.info("%s", text),
            progress=lambda name, done, total: update(description=name, completed=done, total=total),
        )
    console = write_figures(options, result.figures())
    if options.html:
        result.write_html(options.html)
    console.print(*advice_output(result.advice), sep="\n")
    if options.html:
        log.info("page: %s", options.html)
