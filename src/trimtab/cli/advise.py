"""`trimtab advise`: what to do about imbalance on a cluster."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from trimtab.api.advise import advise
from trimtab.cli.output import progress_shown
from trimtab.cli.run_command import add_command, called, show
from trimtab.report.advice import advice_output

log = logging.getLogger("trimtab")


def add(commands: Any) -> None:
    examples = [
        "trimtab advise out/rollout.parquet --cluster h100x8 --ranks 16 --step-tokens 20M --gpu-hour 2.50",
        "trimtab advise out/rollout.parquet --ranks 16 --groups 8 --sampled 0.05 --html out/advice.html",
    ]
    add_command(commands, "advise", advise, run=run, examples=examples)


def run(options: argparse.Namespace) -> None:
    with progress_shown() as update:
        result = called(advise, options, first=lambda text: log.info("%s", text), progress=update)
    show(options, result, *advice_output(result.advice))
