"""`trimtab rollout`: attention and experts of a rollout on the same ranks or on separate ones, and how many."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from rich.markup import escape

from trimtab.api.size_rollout import size_rollout
from trimtab.cli.options import SHARED, add_model, add_options, add_settings, add_trace, given, positive
from trimtab.cli.output import write_figures
from trimtab.report.rollout_sizing import rollout_tables
from trimtab.report.tables import terminal_table


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "rollout",
        description="Size the decode of a rollout: expert parallelism with attention and experts on the same ranks "
        "against the best numbers of attention and expert ranks, with micro-batches that go back and forth. Experts "
        "take the time of the busiest rank by the trace, with and without copies of hot experts.",
        examples=[
            "trimtab rollout out/rollout.parquet --model deepseek-v3 --cluster h200x8 --gpus 128",
            "trimtab rollout out/rollout.parquet --cluster h20x8 --gpu-hour 1.20 --expert-cluster h100x8 "
            "--expert-gpu-hour 2.50 --context 8000",
        ],
    )
    add_trace(parser)
    add_settings(parser)
    option = partial(add_options, parser, of=size_rollout)
    option("--cluster")
    option("--expert-cluster", unset="the cluster")
    add_model(parser, of=size_rollout, unset="the trace's, else a preset like the trace")
    option("--gpus", type=positive, help="most GPUs of a deployment")
    option("--token-ms", type=positive, help="most milliseconds per output token")
    option("--context", type=positive, unset="the trace's", help="tokens in a sequence's KV cache, the mean")
    option("--slots", help=f"{SHARED['--slots'][1]}; of copies of hot experts 2")
    option("--micro-batches", type=positive, nargs="+", help="numbers of micro-batches on separate ranks")
    option("--gpu-hour", unset="no money")
    option("--expert-gpu-hour", unset="no money")
    option("--step", unset="the last of the trace")
    add_options(parser, "--json")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    result = size_rollout(**given(options, size_rollout))
    console = write_figures(options, result.figures())
    console.print(f"[bold]{escape(result.answer)}[/bold]", "", sep="\n")
    console.print(*map(terminal_table, rollout_tables(result.deployments)), sep="\n")
    if result.commands:
        console.print("[bold]Commands[/bold]\n" + escape("\n".join(result.commands)), soft_wrap=True)
