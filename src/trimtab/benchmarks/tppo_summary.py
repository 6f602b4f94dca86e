"""Figures of `trimtab bench t-ppo` from its runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from trimtab.benchmarks.tppo_settings import ALGORITHMS
from trimtab.calibration.alternating_rounds import median_with_interval

OURS = "t-ppo"


def summarise_runs(runs: Sequence[dict[str, Any]], places: int) -> dict[str, Any]:
    """Means of every algorithm over the seeds, and T-PPO against the others, paired by seed.

    Args:
        runs: of `runs_of_seed`, of all seeds.
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
