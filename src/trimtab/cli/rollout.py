"""`trimtab rollout`: attention and experts of a rollout on the same ranks or on separate ones, and how many."""

from __future__ import annotations

import argparse
from typing import Any

from rich.markup import escape
from rich.text import Text

from trimtab.api.run import Run
from trimtab.api.size_rollout import size_rollout
from trimtab.cli.run_command import add_command, called, show
from trimtab.cli.signatures import arguments_of
from trimtab.report.rollout_sizing import rollout_tables
from trimtab.report.tables import terminal_table

USED = {"cluster", "model", "overrides", "slots", "step"}


def add(commands: Any) -> None:
    examples = [
        "trimtab rollout out/rollout.parquet --model deepseek-v3 --cluster h200x8 --gpus 128",
        "trimtab rollout out/rollout.parquet --cluster h20x8 --gpu-hour 1.20 --expert-cluster h100x8 "
        "--expert-gpu-hour 2.50 --context 8000",
    ]
    unused = arguments_of(Run).keys() - USED
    add_command(commands, "rollout", size_rollout, run=run, examples=examples, unused=unused, outputs=["--json"])


def run(options: argparse.Namespace) -> None:
    result = called(size_rollout, options)
    tables = map(terminal_table, rollout_tables(result.deployments))
    commands = [Text.from_markup("[bold]Commands[/bold]\n" + escape("\n".join(result.commands)), overflow="fold")]
    show(options, result, f"[bold]{escape(result.answer)}[/bold]\n", *tables, *(commands if result.commands else ()))
