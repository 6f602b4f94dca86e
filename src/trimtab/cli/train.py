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
  trimtab train --out out/demo --resume --steps 60
  trimtab train --model path/to/qwen3-moe --warm-start-steps 0 --ranks 8 --out out/run
  torchrun --nnodes 2 --nproc-per-node 8 -m trimtab.cli.main train --out /shared/run
"""


MODES = ("plan", "static", "shadow", "off")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        description="Warm start, then GRPO on generated arithmetic. Recompute and update replay the rollout's routing "
        "under the plan. Writes metrics.jsonl, summary.json, settings.json, routing/, checkpoints/ and tensorboard/ "
        "to --out; report.html and timeline.json.gz too, if there are --compare-pairs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for all output; new or empty, except with --resume"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the last checkpoint in --out with the settings of that run; start anew if --out is empty",
    )
    parser.add_argument("--model", type=Path, help="local Hugging Face checkpoint directory (default: a small model)")
    parser.add_argument("--mode", choices=MODES, help="how experts are balanced (default: plan)")
    parser.add_argument("--ranks", type=positive, help="local ranks to start (default: 2)")
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
        ("compare-pairs", whole, "timed pairs of static and trimtab at the end, which the report is made of"),
        ("seed", whole, "of model, problems and sampling"),
    ):
        parser.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    parser.add_argument("--gradient-checkpointing", action="store_true", default=None, help="save activation memory")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    need_extra("torch", "transformers", "tensorboard")
    from trimtab.integrations.transformers import num_experts
    from trimtab.launch import launch, torchrun_ranks
    from trimtab.planner import Placement
    from trimtab.rl.checkpoint import last_checkpoint
    from trimtab.rl.config import TrainConfig, resumed
    from trimtab.rl.demo_model import load_config, load_tokenizer
    from trimtab.rl.run import run_training

    out: Path = options.out
    asked = {field.name: getattr(options, field.name, None) for field in fields(TrainConfig)}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    is_new = not out.exists() or (out.is_dir() and all(path.suffix == ".partial" for path in out.iterdir()))
    is_writer = os.environ.get("RANK", "0") == "0"
    if options.resume and not is_new:
        config, ranks_before = resumed(out, given)
        checkpoint = last_checkpoint(out)
    elif is_writer and not is_new:
        raise InputError(f"--out {out} is there already and not empty; name a new folder, or --resume the run in it")
    else:
        config, ranks_before, checkpoint = TrainConfig(**given), 2, None
    if checkpoint is not None and checkpoint.step > config.steps:
        raise InputError(f"--steps is {config.steps}; the run in {out} has done {checkpoint.step} already")
    ranks = torchrun_ranks() or options.ranks or ranks_before
    model = checkpoint.directory if checkpoint else config.model
    tokenizer = load_tokenizer(model)
    Placement.contiguous(1, num_experts(load_config(model, tokenizer)), ranks)
    if config.problems < ranks:
        raise InputError(f"--problems is {config.problems}; each of the {ranks} ranks needs at least one")
    config.out.mkdir(parents=True, exist_ok=True)
    launch(run_training, (config,), ranks=ranks)
