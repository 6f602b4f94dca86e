"""`trimtab train`: post-train a MoE on local ranks, or as one rank under torchrun."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any, get_args

from trimtab.cli.options import add_options, given, positive, whole
from trimtab.errors import InputError
from trimtab.rank_variables import torchrun_ranks
from trimtab.rl.config import ALGORITHMS, PrefixRouting, RolloutName, TrainConfig, ValueModelName, resumed

MODES = ("plan", "rehome", "static", "shadow", "off")
# Longest responses by default, by task.
LONGEST_RESPONSES = {"sums": TrainConfig.max_new_tokens, "counting": 100}
LIVE_POLICIES = ("quota", "feplb", "off")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        description="Warm start on several tasks, then RL on sums. Recompute and update replay the rollout's routing "
        "under the plan. At the end, a second trainer without balancing trains further steps beside the run's, to "
        "compare times. Writes metrics.jsonl, summary.json, settings.json, routing/, checkpoints/ and tensorboard/ to "
        "the output folder; of a comparison, report.html and timeline.json.gz too.",
        examples=[
            "trimtab train -o out/demo",
            "trimtab train -o out/demo --resume --steps 60",
            "trimtab train -o out/ppo --algorithm ppo",
            "trimtab train -o out/tppo --algorithm t-ppo --task counting --window 32",
            "trimtab train -o out/wide --expert-width 4096",
            "trimtab train -o out/live --live",
            "trimtab train -o out/live-quota --live quota",
            "trimtab train -o out/rollout --rollout disaggregated --micro-batches 3",
            "trimtab train --model path/to/qwen3-moe --warm-start-steps 0 --ranks 8 -o out/run",
            "torchrun --nnodes 2 --nproc-per-node 8 -m trimtab train -o /shared/run",
        ],
    )
    add_options(
        parser, "--output", type=Path, dest="out", required=True, metavar="FOLDER",
        help="folder to write; new or empty, except with --resume",
    )  # fmt: skip
    add_options(
        parser,
        "--resume",
        action="store_true",
        help="continue from the last checkpoint in the folder with the settings of that run; if it is empty, start a "
        "new run",
    )
    option = partial(add_options, parser, of=TrainConfig)
    option("--model", type=Path, metavar="FOLDER", unset="a small model", help="local Hugging Face checkpoint")
    option(
        "--task",
        choices=tuple(LONGEST_RESPONSES),
        help="sums of a few digits, or counting down from a number, whose responses are long and uneven",
    )
    option(
        "--algorithm",
        choices=ALGORITHMS,
        help="grpo compares responses to a problem, ppo trains a value model, t-ppo also generates responses over "
        "several steps",
    )
    option("--expert-width", type=positive, help="inner width of the small model's experts")
    modes = partial(add_options, parser.add_mutually_exclusive_group())
    modes("--mode", of=TrainConfig, choices=MODES, help="how experts are balanced")
    modes(
        "--live",
        nargs="?",
        const="quota",
        choices=LIVE_POLICIES,
        unset="plan from the recorded routing",
        help="balance every layer from what its router chooses, without plan and replay, by a policy, or by auto",
    )
    add_options(parser, "--ranks", unset="2")
    option("--slots", "--steps")
    option(
        "--rollout",
        choices=get_args(RolloutName),
        help="the whole model on every rank, or attention and experts on different ranks",
    )
    option("--attention-ranks", type=positive, help="disaggregated: ranks that generate")
    option("--expert-ranks", type=positive, help="disaggregated: the other ranks, which hold the experts")
    option("--micro-batches", type=positive, help="disaggregated: parts of a rank's batch that take turns")
    option("--problems", type=positive, help="problems of a step")
    option("--samples", type=positive, help="responses to each problem")
    option("--mini-batches", "--token-budget")
    option("--max-new-tokens", type=positive, help="longest response; with counting by default 100")
    option(
        "--value-model",
        choices=get_args(ValueModelName),
        help="ppo, t-ppo: a dense head on the policy's hidden states, or a trunk, a second model with experts, whose "
        "replicas are chosen from live routing",
    )
    option("--window", type=positive, help="t-ppo: most new tokens of a response in a step")
    option(
        "--prefix-routing",
        choices=get_args(PrefixRouting),
        help="t-ppo: how tokens of earlier windows are routed: as recorded then, as in the cache that this step "
        "rebuilt, or by the router",
    )
    option("--learning-rate", type=float, help="learning rate of RL steps")
    option("--warm-start-steps", type=whole, help="supervised steps before RL")
    option("--held-out", type=positive, help="problems that accuracy is measured on")
    option("--save-every", type=positive, help="RL steps between checkpoints")
    option("--compare-pairs", type=whole, help="timed pairs of a balanced and a static step at the end; 0 for none")
    option("--seed")
    option("--gradient-checkpointing", action="store_true", help="save activation memory")
    parser.set_defaults(run=run, needs=("torch", "transformers", "tensorboard"))


def run(options: argparse.Namespace) -> None:
    from trimtab.integrations.transformers import num_experts
    from trimtab.launch import launch
    from trimtab.planner import Placement
    from trimtab.rl.checkpoint import last_checkpoint
    from trimtab.rl.demo_model import load_config, load_tokenizer
    from trimtab.rl.disaggregated_sampling import check_disaggregated
    from trimtab.rl.run import run_training

    out: Path = options.out
    asked = given(options, TrainConfig) | ({} if options.live is None else {"mode": "live", "policy": options.live})
    is_new = not out.exists() or (out.is_dir() and all(path.suffix == ".partial" for path in out.iterdir()))
    is_writer = os.environ.get("RANK", "0") == "0"
    if options.resume and not is_new:
        config, ranks_before = resumed(out, asked)
        checkpoint = last_checkpoint(out)
    elif is_writer and not is_new:
        raise InputError(f"--output {out} is there already and not empty; name a new folder, or --resume the run in it")
    else:
        asked.setdefault("max_new_tokens", LONGEST_RESPONSES[asked.get("task", TrainConfig.task)])
        config, ranks_before, checkpoint = TrainConfig(**asked), 2, None
    if checkpoint is not None and checkpoint.step > config.steps:
        raise InputError(f"--steps is {config.steps}; the run in {out} has done {checkpoint.step} already")
    ranks = torchrun_ranks() or options.ranks or ranks_before
    model = checkpoint.directory if checkpoint else config.model
    tokenizer = load_tokenizer(model, config.task)
    Placement.contiguous(1, num_experts(load_config(model, tokenizer)), ranks)
    if config.value_model == "trunk" and config.algorithm == "grpo":
        raise InputError("--value-model trunk: grpo has no value model; use --algorithm ppo or t-ppo")
    if config.problems < ranks:
        raise InputError(f"--problems is {config.problems}; each of the {ranks} ranks needs at least one")
    if config.rollout == "disaggregated":
        check_disaggregated(config, load_config(model, tokenizer), ranks)
    elif unused := {"attention_ranks", "expert_ranks", "micro_batches"} & asked.keys():
        raise InputError(f"--{min(unused).replace('_', '-')} is for --rollout disaggregated; the rollout is colocated")
    config.out.mkdir(parents=True, exist_ok=True)
    launch(run_training, (config,), ranks=ranks)
