"""`trimtab advise`: what to do about imbalance on a cluster."""

from __future__ import annotations

import argparse
import logging
from functools import partial
from typing import Any

from trimtab.api.advise import MOST_STEPS, advise
from trimtab.cli.options import add_options, given, positive
from trimtab.cli.output import progress_shown, write_figures
from trimtab.cli.run_options import add_run, add_simulated_steps
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
    add_run(parser, of=advise)
    add_simulated_steps(parser, of=advise, most=MOST_STEPS)
    option = partial(add_options, parser, of=advise)
    option("--slots", "--mini-batches")
    option("--sharding", choices=SHARDINGS, help="training state that data ranks share out")
    option("--gpu-hour", unset="no money")
    option("--draws", type=positive, help="drawings of steps of which a part was recorded")
    add_options(parser, "--json", "--html")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    with progress_shown() as update:
        result = advise(**given(options, advise), first=lambda text: log.info("%s", text), progress=update)
    console = write_figures(options, result.figures())
    if options.html:
        result.write_html(options.html)
    console.print(*advice_output(result.advice), sep="\n")
    if options.html:
        log.info("page: %s", options.html)
