"""`python -m benchmarks.t_ppo`: PPO, GRPO and T-PPO with equal numbers of trained tokens on long, uneven responses.

Train the task counting with PPO, GRPO and T-PPO from the same warm start on 2 CPU ranks, until each has trained the
policy on the same number of tokens. Compares decode steps per trained token, held-out accuracy and time. Each run is
one of the command `python -m recipes.rl.train`, whose metrics are read.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.harness import Figures, main, settings_of, show
from benchmarks.tables import Columns, figure_table, interval, named_rows, picture, quantity
from trimtab.calibration.alternating_rounds import median_with_interval
from trimtab.cli.options import add_options, given, positive, whole
from trimtab.cli.parser import Parser
from trimtab.errors import InputError, RankFailedError
from trimtab.report.number_text import seconds

ALGORITHMS = ("ppo", "grpo", "t-ppo")
# What is added up over the steps of a run, by the names of its metrics.
COUNTED = {
    "decode_steps": ("rollout/decode_steps",),
    "sampled_tokens": ("rollout/tokens",),
    "prefix_tokens": ("rollout/prefix_tokens",),
    "computed_tokens": ("tokens/computed",),
    "trained_tokens": ("tokens/trained",),
    "wall_s": ("rollout_s", "prepare_s", "plan_s", "recompute_s", "update_s", "sync_s"),
}
OURS = "t-ppo"
COLOURS = {"ppo": "#d97706", "grpo": "#9333ea", "t-ppo": "#0f766e"}
PANELS = {"decode_steps": "decode steps", "wall_s": "seconds on CPU ranks, without evaluations"}
RUNS: Columns = {
    "algorithm": "{name}",
    "decode steps / 1000 trained": "{decode_steps_per_1000_trained:.1f}",
    "occupancy": "{occupancy:.0%}",
    "sampled / trained": "{sampled_per_trained:.2f}",
    "prefix / trained": "{prefix_per_trained:.2f}",
    "computed / trained": "{computed_per_trained:.2f}",
    "time": quantity("wall_s", seconds),
    "accuracy before": "{accuracy_before:.1%}",
    "after": "{accuracy:.1%}",
}
AGAINST: Columns = {
    "T-PPO against": "{name}",
    "decode steps": "{decode_steps_ratio:.2f}×",
    "95% interval": interval("decode_steps_ratio_interval", "{:.2f}"),
    "accuracy": "{accuracy_difference:+.1%}",
    "95% interval ": interval("accuracy_difference_interval", "{:+.1%}"),
    "to equal accuracy": "{equal_accuracy_ratio:.2f}×",
    "95% interval  ": interval("equal_accuracy_ratio_interval", "{:.2f}"),
}
NOTES = (
    "Decode step: samples a token of every response that has not ended. Occupancy: sampled tokens / (places x decode "
    "steps). Prefix: tokens of prompts and earlier windows, fed in the first decode step. Trained: tokens of the "
    "policy's loss; GRPO samples groups whose responses are all right or all wrong, but does not train them. T-PPO "
    "against another: the other's decode steps per trained token, divided by T-PPO's; to equal accuracy, decode steps "
    "in which the other first reaches the lower of both last accuracies, divided by T-PPO's. Time is without "
    "evaluations. On a CPU a decode step takes longer with more responses; on a GPU much less so."
)


EXAMPLES = ("--json out/bench-tppo.json --picture out/bench-tppo.svg",)


@dataclass(frozen=True)
class TppoBenchmark:
    """Sizes of the benchmark.

    Attributes:
        seeds: seeds 0 to seeds - 1, of model, problems and sampling. All algorithms start from the same warm start.
        trained_tokens: that the policy is trained on in each run.
        places: responses that are generated together, over all ranks.
        samples: responses of GRPO to a problem; PPO and T-PPO have one.
        window: most new tokens of a response in a step of T-PPO.
        value_model: of PPO and T-PPO.
        max_new_tokens: of a response.
        measure_every: steps between measurements of accuracy.
        held_out: problems that accuracy is measured on.
        warm_start_steps, warm_start_batch: of the supervised phase.
        learning_rate: of RL steps.
        expert_width: of the small model.
        most_steps: of a run; one that needs more is given up.
        json: file for the figures; None for none.
        picture: file to draw the curves to; None for none.
    """

    seeds: int = 5
    trained_tokens: int = 40_000
    places: int = 64
    samples: int = 8
    window: int = 32
    value_model: str = "head"
    max_new_tokens: int = 100
    measure_every: int = 5
    held_out: int = 128
    warm_start_steps: int = 150
    warm_start_batch: int = 64
    learning_rate: float = 5e-5
    expert_width: int = 256
    most_steps: int = 1000
    json: Path | None = None
    picture: Path | None = None

    def warm_start(self, seed: int) -> dict[str, Any]:
        """Options of a run that only warms up."""
        names = "held_out", "warm_start_steps", "warm_start_batch", "expert_width", "max_new_tokens"
        return {"steps": 0, "seed": seed} | {name: getattr(self, name) for name in names}

    def algorithm(self, name: str, seed: int, model: Path) -> dict[str, Any]:
        """Options of a run. T-PPO has one optimizer step in an RL step, which has fewer tokens; others have two."""
        samples = self.samples if name == "grpo" else 1
        names = "held_out", "max_new_tokens", "measure_every", "learning_rate"
        return {
            "model": model, "algorithm": name, "seed": seed, "warm_start_steps": 0, "steps": self.most_steps,
            "problems": self.places // samples, "samples": samples, "mini_batches": 1 if name == OURS else 2,
            "save_every": self.most_steps, "compare_pairs": 0, **{name: getattr(self, name) for name in names},
            **({} if name == "grpo" else {"value_model": self.value_model, "window": self.window}),
        }  # fmt: skip


def add_to(parser: Parser) -> None:
    """Add the options."""
    option = partial(add_options, parser, of=TppoBenchmark)
    option("--seeds", type=positive, help="runs of each algorithm: those of seeds 0 to N - 1")
    option("--trained-tokens", type=positive, help="that the policy is trained on in each run")
    option("--places", type=positive, help="responses that are generated together")
    option("--window", type=positive, help="most new tokens of a response in a step of T-PPO")
    option("--value-model", choices=("head", "trunk"), help="of PPO and T-PPO, as in the recipe")
    option("--warm-start-steps", type=whole, help="supervised steps before RL")
    add_options(parser, "--picture", type=Path, help="draw accuracy over decode steps and time to FILE (.svg)")


def run(options: argparse.Namespace) -> None:
    """Train all algorithms with all seeds; which is first depends on the seed."""
    settings = TppoBenchmark(**given(options, TppoBenchmark))
    if settings.places % (2 * settings.samples):
        raise InputError(f"--places is {settings.places}; it should be a multiple of {2 * settings.samples}")
    runs: list[Figures] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in track(range(settings.seeds), "bench t-ppo", transient=True):
            start = Path(folder) / f"{seed}"
            list(metrics_of(start, settings.warm_start(seed)))
            before = json.loads((start / "summary.json").read_text())["held_out_accuracy"]["after warm start"]
            first = seed % len(ALGORITHMS)
            for name in (*ALGORITHMS[first:], *ALGORITHMS[:first]):
                model = start / "checkpoints" / "step-00000"
                run = run_of(settings, name, seed, Path(folder) / f"{seed}-{name}", model)
                runs.append(run | {"points": [dict.fromkeys(COUNTED, 0.0) | {"accuracy": before}, *run["points"]]})
    runs.sort(key=lambda each: (each["seed"], ALGORITHMS.index(each["algorithm"])))
    figures: Figures = {
        "schema": "trimtab-bench-t-ppo-1",
        "settings": settings_of(settings, "picture"),
        "ranks": 2,
        "device": f"CPU, {platform.machine()}, {os.cpu_count()} cores",
        "runs": runs,
        "summary": summarise_runs(runs, settings.places),
    }
    show(figures, print_figures, settings.json)
    if settings.picture is not None:
        draw_curves(runs, settings.picture)


def metrics_of(out: Path, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Metrics of each step of a run of the recipe, as it goes on; the run ends when no more are asked for.

    Raises:
        RankFailedError: if the run fails.
    """
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "recipes.rl.train", "--output", str(out), "--task", "counting", *words]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        # A line is printed after each step's metrics are written.
        seen = 0
        for _ in process.stdout:
            lines = (out / "metrics.jsonl").read_text().splitlines()
            yield from map(json.loads, lines[seen:])
            seen = len(lines)
        _, error = process.communicate()
        if process.returncode:
            raise RankFailedError(f"{out.name}: {error.strip()}")
    finally:
        process.terminate()
        process.communicate()


def run_of(settings: TppoBenchmark, algorithm: str, seed: int, out: Path, model: Path) -> Figures:
    """A run of one algorithm, until enough tokens are trained.

    Returns:
        `algorithm`, `seed`; `points`, one for each measurement of accuracy: what was counted until then, `wall_s`
        without evaluations, and `accuracy`; `rollout_logprob_diff` of T-PPO.
    """
    counted, points, differences = dict.fromkeys(COUNTED, 0.0), list[Figures](), list[float]()
    for metrics in metrics_of(out, settings.algorithm(algorithm, seed, model)):
        for name, parts in COUNTED.items():
            counted[name] += sum(metrics[part] for part in parts)
        differences.append(metrics["ppo/rollout_logprob_diff"])
        if "held_out_accuracy" in metrics:
            points.append({**counted, "accuracy": metrics["held_out_accuracy"]})
            if counted["trained_tokens"] >= settings.trained_tokens:
                break
    else:
        raise InputError(
            f"{algorithm} trained {counted['trained_tokens']:,.0f} tokens in {settings.most_steps} steps, seed {seed}; "
            f"--trained-tokens {settings.trained_tokens:,} is out of reach. Responses that are all right or all wrong "
            "train nothing: change --warm-start-steps or --trained-tokens"
        )
    known = {"recorded": float(np.mean(differences))} if algorithm == OURS else {}
    return {"algorithm": algorithm, "seed": seed, "points": points, "rollout_logprob_diff": known}


def summarise_runs(runs: Sequence[dict[str, Any]], places: int) -> Figures:
    """Means of every algorithm over the seeds, and T-PPO against the others, paired by seed.

    Args:
        runs: of `run_of`, of all seeds.
        places: responses that are generated together.

    Returns:
        `algorithms` by name, each a mean over seeds; `against` PPO and GRPO: median and 95% bootstrap interval over
        seeds of `decode_steps_ratio` (decode steps per trained token of the other, divided by those of T-PPO),
        `accuracy_difference` (of T-PPO minus that of the other, at the end) and `equal_accuracy_ratio` (decode steps in
        which the other reaches the lower of both last accuracies, divided by T-PPO's);
        `rollout_logprob_diff` of T-PPO by prefix routing.
    """
    of = {name: [run for run in runs if run["algorithm"] == name] for name in ALGORITHMS}
    against: dict[str, dict[str, Any]] = {}
    for name in ALGORITHMS:
        if name == OURS:
            continue
        pairs = list(zip(of[OURS], of[name], strict=True))
        values = {
            "decode_steps_ratio": [per_trained(other) / per_trained(ours) for ours, other in pairs],
            "accuracy_difference": [
                ours["points"][-1]["accuracy"] - other["points"][-1]["accuracy"] for ours, other in pairs
            ],
            "equal_accuracy_ratio": [equal_accuracy_ratio(ours, other) for ours, other in pairs],
        }
        against[name] = {}
        for figure, by_seed in values.items():
            median, interval = median_with_interval(by_seed)
            against[name] |= {figure: median, f"{figure}_interval": interval, f"{figure}_by_seed": by_seed}
    differences = [run["rollout_logprob_diff"] for run in of[OURS]]
    return {
        "algorithms": {name: _means(of[name], places) for name in ALGORITHMS},
        "against": against,
        "rollout_logprob_diff": {
            kind: float(np.mean([found[kind] for found in differences if kind in found]))
            for kind in dict.fromkeys(kind for found in differences for kind in found)
        },
    }


def per_trained(run: dict[str, Any]) -> float:
    """Decode steps per trained token of a run."""
    last = run["points"][-1]
    return float(last["decode_steps"] / last["trained_tokens"])


def equal_accuracy_ratio(ours: dict[str, Any], other: dict[str, Any]) -> float:
    """Decode steps in which another run reaches the lower of both last accuracies, divided by those of ours.

    1 if that is not above the accuracy before training.
    """
    accuracy = min(run["points"][-1]["accuracy"] for run in (ours, other))
    needed = steps_to(ours, accuracy)
    return steps_to(other, accuracy) / needed if needed else 1.0


def steps_to(run: dict[str, Any], accuracy: float) -> float:
    """Decode steps in which a run first reaches an accuracy, which it does reach; interpolated between evaluations."""
    points = run["points"]
    if points[0]["accuracy"] >= accuracy:
        return 0.0
    before, after = next(pair for pair in pairwise(points) if pair[1]["accuracy"] >= accuracy)
    part = (accuracy - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
    return float(before["decode_steps"] + part * (after["decode_steps"] - before["decode_steps"]))


def _means(runs: Sequence[dict[str, Any]], places: int) -> dict[str, float]:
    last = [run["points"][-1] for run in runs]
    found = {
        "decode_steps_per_1000_trained": [1000 * per_trained(run) for run in runs],
        "occupancy": [each["sampled_tokens"] / (places * each["decode_steps"]) for each in last],
        "sampled_per_trained": [each["sampled_tokens"] / each["trained_tokens"] for each in last],
        "prefix_per_trained": [each["prefix_tokens"] / each["trained_tokens"] for each in last],
        "computed_per_trained": [each["computed_tokens"] / each["trained_tokens"] for each in last],
        "wall_s": [each["wall_s"] for each in last],
        "accuracy_before": [run["points"][0]["accuracy"] for run in runs],
        "accuracy": [each["accuracy"] for each in last],
    }
    return {name: float(np.mean(values)) for name, values in found.items()}


def draw_curves(runs: Sequence[Figures], path: Path) -> None:
    """Write accuracy over decode steps and time as SVG: a thin line for each run, and a thick one for their mean."""
    with picture(path, 1, len(PANELS), (5.5, 3.6), sharey=True) as axes:
        for axis, (name, label) in zip(axes[0], PANELS.items(), strict=True):
            for algorithm, colour in COLOURS.items():
                mine = [run["points"] for run in runs if run["algorithm"] == algorithm]
                curves = [np.array([[point[name], 100 * point["accuracy"]] for point in points]) for points in mine]
                for curve in curves:
                    axis.plot(*curve.T, color=colour, linewidth=0.7, alpha=0.4)
                axis.plot(*np.mean(curves, axis=0).T, color=colour, linewidth=2.2, label=algorithm)
            axis.set_xlabel(label)
            axis.set_xlim(left=0)
        axes[0, 0].set_ylabel("held-out accuracy, %")
        axes[0, 0].set_ylim(bottom=0)
        axes[0, 0].legend()


def print_figures(figures: Figures, console: Console) -> None:
    """Print the algorithms, T-PPO against the others, and how far the recompute is from the rollout."""
    settings, summary = figures["settings"], figures["summary"]
    title = (
        f"{settings['trained_tokens']:,} trained tokens, {settings['places']} places, responses up to "
        f"{settings['max_new_tokens']}, window {settings['window']}: means of {settings['seeds']} seeds"
    )
    console.print(figure_table(title, RUNS, named_rows(summary["algorithms"])))
    console.print(figure_table("Medians over seeds", AGAINST, named_rows(summary["against"])))
    for kind, difference in summary["rollout_logprob_diff"].items():
        console.print(f"prefixes {kind}: log-probabilities of new tokens differ from the rollout's by {difference:.4f}")
    console.print(NOTES)


if __name__ == "__main__":
    main("benchmarks.t_ppo")
