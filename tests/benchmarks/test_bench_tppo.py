"""Figures of `python -m benchmarks.t_ppo` from runs, and a small run of it."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from benchmarks.t_ppo_runs import TppoBenchmark
from rich.console import Console
from trimtab.rl.task import Problem

from benchmarks.t_ppo import equal_accuracy_ratio, print_figures, run_benchmark, summarise_runs
from helpers.rank_pool import on_ranks


def run_of(algorithm: str, seed: int, accuracies: list[float], decode_steps: int, tokens: int) -> dict[str, Any]:
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
    other = run_of("ppo", 0, [0.0, 0.2, 0.6], decode_steps=50, tokens=10)
    # 0.6 after 100 and 30; 0.1 after 25 and 10 x 0.1 / 0.6; the plateau before the end does not count.
    assert equal_accuracy_ratio(run_of("t-ppo", 0, [0.0, 0.4, 0.8], 20, 10), other) == pytest.approx(100 / 30)
    assert equal_accuracy_ratio(run_of("t-ppo", 0, [0.0, 0.6, 0.1], 10, 10), other) == pytest.approx(25 / (10 / 6))
    early = run_of("ppo", 0, [0.0, 0.6, 0.6, 0.6], decode_steps=50, tokens=10)
    assert equal_accuracy_ratio(run_of("t-ppo", 0, [0.0, 0.6], 20, 10), early) == pytest.approx(50 / 20)
    assert equal_accuracy_ratio(run_of("t-ppo", 0, [0.3, 0.3], 20, 10), early) == 1.0


def test_runs_are_compared_seed_by_seed() -> None:
    runs = []
    for seed in (1, 2, 3):
        runs.append(run_of("t-ppo", seed, [0.0, 0.5], decode_steps=10, tokens=100))
        runs.append(run_of("ppo", seed, [0.0, 0.1 * seed], decode_steps=10 * seed, tokens=50))
        runs.append(run_of("grpo", seed, [0.0, 0.5], decode_steps=10, tokens=100))
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


def run_with_some_rewards(settings: TppoBenchmark) -> None:
    """Half of all responses are right, so that GRPO, which trains nothing on equal rewards, needs few steps."""
    with mock.patch.object(Problem, "reward", lambda problem, response: float(zlib.crc32(response.encode()) % 2)):
        run_benchmark(settings)


@pytest.mark.nightly
def test_a_small_run_writes_figures_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = TppoBenchmark(
        seeds=1, trained_tokens=40, places=8, samples=2, window=4, max_new_tokens=8, evaluations=2, held_out=2,
        warm_start_steps=1, warm_start_batch=2, expert_width=16, json=tmp_path / "f.json", picture=tmp_path / "f.svg",
    )  # fmt: skip
    on_ranks(run_with_some_rewards, (settings,), ranks=2)
    figures = json.loads((tmp_path / "f.json").read_text())
    runs = {run["algorithm"]: run for run in figures["runs"]}
    assert set(runs) == {"ppo", "grpo", "t-ppo"}
    for name, run in runs.items():
        last = run["points"][-1]
        assert len(run["points"]) == 3
        assert last["trained_tokens"] >= 40
        assert last["sampled_tokens"] <= 8 * last["decode_steps"]
        assert last["wall_s"] > 0
        assert set(run["rollout_logprob_diff"]) == ({"recorded", "rebuilt", "live"} if name == "t-ppo" else set())
    assert "<svg" in (tmp_path / "f.svg").read_text()
    print_figures(figures, Console(width=160))
    assert "prefixes rebuilt" in capsys.readouterr().out
