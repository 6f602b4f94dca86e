"""`trimtab init`: write a settings file for `advise`, `analyze`, `plan` and `simulate`."""

from __future__ import annotations

import argparse
import logging
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab.cli.options import add_options
from trimtab.cli.settings import known_settings
from trimtab.errors import InputError
from trimtab.files import write_atomically

log = logging.getLogger("trimtab")

HEADER = """\
# Settings of a run, for trimtab advise, analyze, plan, rollout and simulate: --settings FILE.
# Options on the command line win. Remove the # before a key to set it.
# Keys are the options of these commands, with _ for -.
"""
# By section, examples of keys, as TOML. Those that are the default are set.
SECTIONS: dict[str, dict[str, str]] = {
    "Cluster and model": {"cluster": '"h100x8"', "model": '"qwen3-30b-a3b"'},
    "Layout": {
        "ranks": "16", "ranks_per_node": "8", "groups": "1", "tp": "1", "pp": "1", "cp": "1", "slots": '"auto"',
        "dispatcher": '"tokens"',
    },
    "Step": {
        "token_budget": "8192", "micro_steps": "32", "mini_batches": "1", "step_tokens": '"20M"', "sampled": "0.05",
        "recompute": "false", "recompute_granularity": '"full"', "sharding": '"zero1"',
    },
    "Rollout": {"gpus": "64", "token_ms": "150", "context": "8000", "expert_cluster": '"h200x8"'},
    "Price": {"gpu_hour": "2.50", "expert_gpu_hour": "3.50"},
}  # fmt: skip
SET = ("cluster", "groups", "slots", "mini_batches")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "init",
        description="Write a settings file: cluster, model, layout, step and price of a run, each with a comment, for "
        "the commands advise, analyze, plan and simulate. An existing file is not changed.",
        examples=["trimtab init", "trimtab init -o out/run.toml && trimtab advise t.parquet --settings out/run.toml"],
    )
    add_options(parser, "--output", type=Path, default=Path("trimtab.toml"), help="file to write: the settings (.toml)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    if options.output.exists():
        raise InputError(f"{options.output}: exists already; remove it, or name another file with -o")
    write_atomically(options.output, HEADER + "".join(_sections()))
    log.info("settings: %s", options.output)


def _sections() -> Iterator[str]:
    known = known_settings()
    for title, examples in SECTIONS.items():
        yield f"\n## {title}\n"
        for key, example in examples.items():
            lines = textwrap.wrap((known[key].help or "").replace("%%", "%"), 98)
            yield "".join(f"# {line}\n" for line in lines) + f"{'' if key in SET else '# '}{key} = {example}\n"
