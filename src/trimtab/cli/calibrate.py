"""`trimtab calibrate`: measure this machine and write a cluster file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from trimtab.cli.options import check_outputs, need_extra, positive
from trimtab.cluster import write_cluster
from trimtab.files import write_json


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        description="Measure how fast this machine's ranks and links are in a training step of a model, all ranks at "
        "once, and write a cluster's TOML file, with a source for every figure.",
        epilog="example: trimtab calibrate -o local.toml",
    )
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="TOML", help="file to write")
    parser.add_argument(
        "--model",
        metavar="NAME|PATH",
        help="whose sizes to measure at: a model that comes with Trimtab, a config.json or a checkpoint directory "
        "(default: that of bench runtime on a CPU, qwen3-30b-a3b on GPUs)",
    )
    parser.add_argument("--ranks", type=positive, metavar="N", help="local ranks (default: all GPUs, or 2 on a CPU)")
    parser.add_argument("--rounds", type=positive, default=15, metavar="N", help="repetitions (default: 15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    check_outputs(options.out, options.json)
    need_extra("torch", "transformers")
    from trimtab.calibration import calibrate, settings_for
    from trimtab.calibration.calibration_table import calibration_table

    name = options.out.stem or "this machine"
    result = calibrate(settings_for(options.model, ranks=options.ranks, rounds=options.rounds, name=name))
    if result is None:
        return
    write_cluster(options.out, result.cluster, result.sources)
    if options.json:
        write_json(options.json, result.to_json())
    Console(highlight=False).print(calibration_table(result), f"Written to {options.out}", sep="\n")
