"""`trimtab doctor`: find problems that would stop or slow a run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trimtab.cli.options import positive, whole
from trimtab.cluster import ModelSpec
from trimtab.errors import InputError
from trimtab.files import write_json

COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}

EPILOG = """examples:
  trimtab doctor
  trimtab doctor --model path/to/qwen3-moe --ranks 8
  torchrun --nnodes 2 --nproc-per-node 8 -m trimtab.cli.main doctor --model path/to/qwen3-moe
"""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        description="Check the installation, the machine, a model's config, and one micro-step with replicas against a "
        "single process. Exit status 1 if there is a problem; warnings don't count.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="PATH", help="config.json or checkpoint to look at as well")
    parser.add_argument("--ranks", type=positive, default=2, metavar="N", help="local ranks (default: 2)")
    parser.add_argument("--slots", type=whole, default=2, metavar="N", help="replicas a rank has room for (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the findings to FILE")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns the exit status."""
    from trimtab.doctor import examine

    ranks = int(os.environ.get("WORLD_SIZE", options.ranks))
    if ranks < 2:
        raise InputError(f"--ranks is {ranks}; experts are shared by 2 or more")
    model, num_layers = None, None
    if options.model is not None:
        model = ModelSpec.from_config(options.model)
        file = options.model / "config.json" if options.model.is_dir() else options.model
        num_layers = json.loads(file.read_text()).get("num_hidden_layers")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    findings = examine(ranks=ranks, local_ranks=local_ranks, slots=options.slots, model=model, num_layers=num_layers)
    if os.environ.get("RANK", "0") != "0":
        return 0
    table = Table("check", "", box=None, title="trimtab doctor", title_justify="left", title_style="bold")
    table.add_column("finding", overflow="fold")
    for finding in findings:
        table.add_row(finding.name, f"[{COLOURS[finding.status]}]{finding.status}", escape(finding.text))
    Console(highlight=False).print(table)
    problems = [finding for finding in findings if finding.status == "problem"]
    if options.json:
        content = {"schema": "trimtab-doctor-1", "ranks": ranks, "problems": len(problems)}
        write_json(options.json, content | {"findings": [asdict(finding) for finding in findings]})
    if not problems:
        return 0
    first = problems[0]
    print(
        f"trimtab doctor: {len(problems)} of {len(findings)} checks failed; {first.name}: {first.text}", file=sys.stderr
    )
    return 1
