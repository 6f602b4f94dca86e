"""Figures of `python -m benchmarks.t_ppo` from runs, and a small run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.t_ppo import (
    TppoBenchmark,
    draw_curves,
    equal_accuracy_ratio,
    metrics_of,
    print_figures,
    run_of,
    summarise_runs,
)

ROOT = Path(__file__).parents[2]


def some_run(algorithm: str, seed: int, accuracies: list[float], decode_steps: int, tokens: int) -> dict[str, Any]:
    """A run with equal distances between evaluations."""
    points = [
        {
            "decode_steps": decode_steps * number, "sampled_tokens": 2 * tokens * number, "prefix_tokens": 0,
            "computed_tokens": 3 * tokens * number, "trained_tokens": tokens * number, "wall_s": float(number),
            "accuracy": accuracy,
        }
        for number, accuracy in enumerate(accuracies)
    ]  # fmt: skip
    return {"algorithm": algorithm, "seed": seed, "points": points, "rollout_logprob_diff": {"recorded": 0.1 * seed}}


def test_decode_steps_to_equal_accuracy_are_interpolated() -> None:
    other = some_run("ppo", 0, [0.0, 0.2, 0.6], decode_steps=50, tokens=10)
    # 0.6 after 100 and 30; 0.1 after 25 and 10 x 0.1 / 0.6; the plateau before the end does not count.
    assert equal_accuracy_ratio(some_run("t-ppo", 0, [0.0, 0.4, 0.8], 20, 10), other) == pytest.approx(100 / 30)
    assert equal_accuracy_ratio(some_run("t-ppo", 0, [0.0, 0.6, 0.1], 10, 10), other) == pytest.approx(25 / (10 / 6))
    early = some_run("ppo", 0, [0.0, 0.6, 0.6, 0.6], decode_steps=50, tokens=10)
    assert equal_accuracy_ratio(some_run("t-ppo", 0, [0.0, 0.6], 20, 10), early) == pytest.approx(50 / 20)
    assert equal_accuracy_ratio(some_run("t-ppo", 0, [0.3, 0.3], 20, 10), early) == 1.0


def test_runs_are_compared_seed_by_seed() -> None:
    runs = []
    for seed in (1, 2, 3):
        runs.append(some_run("t-ppo", seed, [0.0, 0.5], decode_steps=10, tokens=100))
        runs.append(some_run("ppo", seed, [0.0, 0.1 * seed], decode_steps=10 * seed, tokens=50))
        runs.append(some_run("grpo", seed, [0.0, 0.5], decode_steps=10, tokens=100))
    found = summarise_runs(runs, places=40)
    assert found["against"]["ppo"]["decode_steps_ratio_by_seed"] == pytest.approx([2, 4, 6])
    assert found["against"]["ppo"]["decode_steps_ratio"] == pytest.approx(4)
    assert found["against"]["ppo"]["accuracy_difference_by_seed"] == pytest.approx([0.4, 0.3, 0.2])
    assert found["against"]["grpo"]["equal_accuracy_ratio"] == pytest.approx(1)
    # To 0.1, 0.2 and 0.3.
    assert found["against"]["ppo"]["equal_accuracy_ratio_by_seed"] == pytest.approx([10 / 2, 20 / 4, 30 / 6])
    assert found["algorithms"]["t-ppo"]["occupancy"] == pytest.approx(200 / 400)
    assert found["algorithms"]["ppo"]["decode_steps_per_1000_trained"] == pytest.approx(400)
    assert found["rollout_logprob_diff"] == pytest.approx({"recorded": 0.2})


@pytest.mark.nightly
def test_a_run_of_the_recipe_ends_when_enough_tokens_are_trained(tmp_path: Path) -> None:
    settings = TppoBenchmark(
        trained_tokens=60, places=4, samples=2, window=4, max_new_tokens=8, measure_every=2, held_out=2,
        warm_start_steps=1, warm_start_batch=2, expert_width=16, most_steps=50,
    )  # fmt: skip
    assert list(metrics_of(tmp_path / "start", settings.warm_start(seed=0))) == []
    model = tmp_path / "start" / "checkpoints" / "step-00000"
    run = run_of(settings, "t-ppo", 0, tmp_path / "out", model)
    assert set(run["rollout_logprob_diff"]) == {"recorded"}
    tokens = [point["trained_tokens"] for point in run["points"]]
    assert tokens[-1] >= 60 > max([0, *tokens[:-1]])
    assert all(0 < point["sampled_tokens"] <= 4 * point["decode_steps"] for point in run["points"])


def test_figures_are_drawn_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = json.loads((ROOT / "docs" / "benchmarks" / "tppo-cpu.json").read_text())
    draw_curves(figures["runs"], tmp_path / "f.svg")
    assert "<svg" in (tmp_path / "f.svg").read_text()
    print_figures(figures, Console(width=160))
    assert "prefixes recorded" in capsys.readouterr().out
