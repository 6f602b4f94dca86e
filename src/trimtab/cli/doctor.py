"""`trimtab doctor`: find problems that would stop or slow a run."""

from __future__ import annotations

import argparse
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from trimtab.cli.options import add_model, add_options, need_extra, whole
from trimtab.cli.output import write_figures
from trimtab.cluster import read_checkpoint
from trimtab.errors import InputError
from trimtab.figures import plural
from trimtab.rank_variables import rank_variable, torchrun_ranks

if TYPE_CHECKING:
    from trimtab.doctor.finding import Finding

FRAMEWORKS = ("verl", "slime", "miles")
COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}

log = logging.getLogger("trimtab")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        description="Check the installation, the machine, a model's config, and one micro-step with replicas against a "
        "single process. Exit status 1 if there is a problem; warnings don't count. With --gpu it checks the GPUs "
        "instead: their environment, the rates of links and equal results. It ends with GO, GO WITH LIMITS (exit "
        "status 3) or NO GO (exit status 1) and the first finding that led to it; docs/gpu.md describes the stages.",
        examples=[
            "trimtab doctor",
            "trimtab doctor --model path/to/qwen3-moe --ranks 8",
            "trimtab doctor --megatron path/to/pretrain.sh",
            "trimtab doctor --verl path/to/run.sh",
            "trimtab doctor --gpu --json out/gpu.json",
            "torchrun --nnodes 2 --nproc-per-node 8 -m trimtab doctor --model path/to/qwen3-moe",
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
    for name in FRAMEWORKS:
        kind = "config (YAML), or the script that sets it" if name == "verl" else "arguments, such as its script"
        text = f"the same for a {name} run with Trimtab's plugin: its {kind} (default: none)"
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=text)
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="check the GPUs of this machine instead: environment, rates of links, equal results",
    )
    add_options(parser, "--ranks", unset="2; with --gpu all GPUs")
    add_options(parser, "--slots", type=whole, default=2)
    add_options(parser, "--json")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns the exit status."""
    if options.gpu:
        return run_on_gpus(options)
    from trimtab.doctor import FILE_CHECKS, examine
    from trimtab.doctor.finding import Finding

    ranks = torchrun_ranks() or options.ranks or 2
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
    files = {name: getattr(options, name) for name in FILE_CHECKS}
    of_files = [finding for name, path in files.items() if path is not None for finding in FILE_CHECKS[name](path)]
    local_ranks = rank_variable("LOCAL_WORLD_SIZE", ranks)
    findings = examine(ranks=ranks, local_ranks=local_ranks, slots=options.slots, model=model, num_layers=num_layers)
    findings += of_files
    if unclear:
        findings.append(Finding("model sizes", "warning", unclear))
    if os.environ.get("RANK", "0") != "0":
        return 0
    table = _table("trimtab doctor", "check")
    for finding in findings:
        table.add_row(finding.name, *_cells(finding))
    problems = [finding for finding in findings if finding.status == "problem"]
    figures = {"schema": "trimtab-doctor-1", "ranks": ranks, "problems": len(problems)}
    write_figures(options, figures | {"findings": [asdict(finding) for finding in findings]}).print(table)
    if not problems:
        return 0
    first = problems[0]
    log.error("trimtab doctor: %d of %d checks failed; %s: %s", len(problems), len(findings), first.name, first.text)
    return 1


def run_on_gpus(options: argparse.Namespace) -> int:
    """`--gpu`. Returns the exit status."""
    if torchrun_ranks():
        raise InputError("--gpu starts its own ranks, to stop them where they hang; run it without torchrun")
    for name in ("model", "megatron", *FRAMEWORKS):
        if getattr(options, name) is not None:
            raise InputError(f"--{name}: --gpu does not check it; run trimtab doctor without --gpu as well")
    need_extra("torch")
    from trimtab.doctor.finding import Finding
    from trimtab.doctor.gpu_examination import examine_gpus

    figures = examine_gpus(options.ranks)
    table = _table(None, "stage", "check")
    for stage in figures["stages"]:
        for finding in stage["findings"]:
            table.add_row(stage["name"], finding["name"], *_cells(Finding(**finding)))
    console = write_figures(options, figures)
    console.print(f"trimtab doctor --gpu, {plural(figures['ranks'], 'rank')}", style="bold", soft_wrap=True)
    console.print(table)
    console.print(f"\n{escape(figures['verdict'])}", style="bold", soft_wrap=True)
    return int(figures["status"])


def _table(title: str | None, *columns: str) -> Table:
    """A table of findings, with the given columns before status and text."""
    table = Table(*columns, "", box=None, title=title, title_justify="left", title_style="bold")
    table.add_column("finding", overflow="fold")
    return table


def _cells(finding: Finding) -> tuple[str, str]:
    """Status and text of a finding."""
    return f"[{COLOURS[finding.status]}]{finding.status}", escape(finding.text)
