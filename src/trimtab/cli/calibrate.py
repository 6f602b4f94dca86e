"""`trimtab calibrate`: measure this machine and write a cluster file."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from trimtab.cli.options import add_model, add_options, add_output
from trimtab.cli.output import write_figures
from trimtab.cluster import write_cluster

log = logging.getLogger("trimtab")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        description="Measure the compute and link rates of this machine in a training step of a model, on all ranks at "
        "once, and write a cluster's TOML file. What can't be measured here is not written; the file names the preset "
        "that has it.",
        examples=["trimtab calibrate -o local.toml"],
    )
    add_output(parser, "the cluster (.toml)")
    add_model(parser, unset="that of benchmarks.runtime on a CPU, qwen3-30b-a3b on GPUs")
    add_options(parser, "--ranks", unset="all GPUs, or 2 on a CPU")
    add_options(parser, "--rounds", default=15)
    add_options(parser, "--json")
    parser.set_defaults(run=run, needs=("torch", "transformers"))


def run(options: argparse.Namespace) -> None:
    from trimtab.calibration.calibrate import calibrate
    from trimtab.calibration.calibration_result import calibration_table
    from trimtab.calibration.calibration_settings import settings_for

    name = options.output.stem or "this machine"
    overrides = dict(getattr(options, "overrides", ()))
    settings = settings_for(options.model, overrides, ranks=options.ranks, rounds=options.rounds, name=name)
    result = calibrate(settings)
    if result is None:
        return
    write_cluster(options.output, result.cluster, result.sources, base=result.preset.name)
    write_figures(options, result.to_json()).print(calibration_table(result))
    for line in result.warnings:
        log.warning(line)
    log.info("cluster: %s", options.output)
