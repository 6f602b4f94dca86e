"""`trimtab doctor`: find problems that would stop or slow a run."""

from __future__ import annotations

import argparse
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from trimtab.cli.options import add_model, add_options
from trimtab.cli.output import write_figures
from trimtab.cluster import read_checkpoint
from trimtab.errors import InputError
from trimtab.rank_variables import rank_variable, torchrun_ranks

COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}

log = logging.getLogger("trimtab")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        description="Check the installation, the machine, a model's config, and one micro-step with replicas against a "
        "single process. Exit status 1 if there is a problem; warnings don't count.",
        examples=[
            "trimtab doctor",
            "trimtab doctor --model path/to/qwen3-moe --ranks 8",
            "trimtab doctor --megatron path/to/pretrain.sh",
            "torchrun --nnodes 2 --nproc-per-node 8 -m trimtab.cli.main doctor --model path/to/qwen3-moe",
        ],
    )
    add_model(parser, type=Path, unset="none", help="a config.json or a checkpoint folder, to check as well")
    parser.add_argument(
        "--megatron",
        type=Path,
        metavar="FILE",
        help="options of a Megatron run, to check as well: JSON or YAML of its arguments or TransformerConfig, a log "
        "with its arguments, or a script of its flags (default: none)",
    )
    add_options(parser, "--ranks", "--slots", default=2)
    add_options(parser, "--json")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns the exit status."""
    from trimtab.doctor import check_megatron, examine
    from trimtab.doctor.finding import Finding

    ranks = torchrun_ranks() or options.ranks
    if ranks < 2:
        raise InputError(f"--ranks is {ranks}; experts are shared by 2 or more")
    model, num_layers, unclear = None, None, ""
    overrides = dict(getattr(options, "overrides", ()))
    if options.model is not None:
        model, reading = read_checkpoint(options.model, overrides)
        unclear = reading.text
        num_layers = model.moe_layers + model.dense_layers if model.moe_layer_indices else None
    elif overrides:
        raise InputError(f"--set {next(iter(overrides))}: needs --model")
    of_megatron = [] if options.megatron is None else check_megatron(options.megatron)
    local_ranks = rank_variable("LOCAL_WORLD_SIZE", ranks)
    findings = examine(ranks=ranks, local_ranks=local_ranks, slots=options.slots, model=model, num_layers=num_layers)
    findings += of_megatron
    if unclear:
        findings.append(Finding("model sizes", "warning", unclear))
    if os.environ.get("RANK", "0") != "0":
        return 0
    table = Table("check", "", box=None, title="trimtab doctor", title_justify="left", title_style="bold")
    table.add_column("finding", overflow="fold")
    for finding in findings:
        table.add_row(finding.name, f"[{COLOURS[finding.status]}]{finding.status}", escape(finding.text))
    problems = [finding for finding in findings if finding.status == "problem"]
    figures = {"schema": "trimtab-doctor-1", "ranks": ranks, "problems": len(problems)}
    write_figures(options, figures | {"findings": [asdict(finding) for finding in findings]}).print(table)
    if not problems:
        return 0
    first = problems[0]
    log.error("trimtab doctor: %d of %d checks failed; %s: %s", len(problems), len(findings), first.name, first.text)
    return 1
