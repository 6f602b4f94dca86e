"""`trimtab train`: post-train a MoE on local ranks, or as one rank under torchrun."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from trimtab.cli.options import need_extra, positive, whole
from trimtab.errors import InputError

EPILOG = """examples:
  trimtab train --out out/demo
  trimtab train --model path/to/qwen3-moe --warm-start-steps 0 --ranks 8 --out out/run
  torchrun --nnodes 2 --nproc-per-node 8 -m trimtab.cli.main train --out /shared/run
"""


MODES = ("plan", "static", "shadow", "off")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="post-train a MoE with RL on local ranks, balanced by Trimtab",
        description="Warm start, then GRPO on generated arithmetic. Recompute and update replay the rollout's routing "
        "under the plan. Writes metrics.jsonl, summary.json, routing/, checkpoints/ and tensorboard/ to --out.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for all output; it must be new or empty")
    parser.add_argument("--model", type=Path, help="local Hugging Face checkpoint directory (default: a small model)")
    parser.add_argument("--mode", choices=MODES, help="how experts are balanced (default: plan)")
    parser.add_argument("--ranks", type=positive, default=2, help="local ranks to start (default: 2)")
    for name, kind, text in (
        ("slots", whole, "replicas a rank has room for in every layer"),
        ("steps", whole, "RL steps"),
        ("problems", positive, "problems of a step"),
        ("samples", positive, "responses to each problem"),
        ("mini-batches", positive, "optimizer steps in an RL step"),
        ("token-budget", positive, "most tokens of a rank in a micro-step"),
        ("max-new-tokens", positive, "longest response"),
        ("learning-rate", float, "of GRPO"),
        ("warm-start-steps", whole, "supervised steps before RL"),
        ("held-out", positive, "problems that accuracy is measured on"),
        ("save-every", positive, "RL steps between checkpoints"),
        ("compare-pairs", whole, "timed pairs of static and trimtab at the end"),
        ("seed", whole, "of model, problems and sampling"),
    ):
        parser.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    parser.add_argument("--gradient-checkpointing", action="store_true", default=None, help="save activation memory")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    need_extra("torch", "transformers", "tensorboard")
    from trimtab.integrations.transformers import num_experts
    from trimtab.planner import Placement
    from trimtab.rl.config import TrainConfig
    from trimtab.rl.model import load_config, load_tokenizer
    from trimtab.rl.run import run_training
    from trimtab.runtime.launch import launch, torchrun_ranks

    given = {field.name: getattr(options, field.name, None) for field in fields(TrainConfig)}
    config = TrainConfig(**{name: value for name, value in given.items() if value is not None})
    ranks = torchrun_ranks() or options.ranks
    is_writer = os.environ.get("RANK", "0") == "0"
    if is_writer and config.out.exists() and (not config.out.is_dir() or any(config.out.iterdir())):
        raise InputError(f"--out {config.out} is there already and not empty; name a new folder")
    tokenizer = load_tokenizer(config.model)
    Placement.contiguous(1, num_experts(load_config(config.model, tokenizer)), ranks)
    if config.problems < ranks:
        raise InputError(f"--problems is {config.problems}; each of the {ranks} ranks needs at least one")
    config.out.mkdir(parents=True, exist_ok=True)
    launch(run_training, (config,), ranks=ranks)
