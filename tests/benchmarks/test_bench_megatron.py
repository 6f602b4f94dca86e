"""Ratios of Megatron's step times, and a small run of `python -m benchmarks.megatron`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.megatron import RATIOS, print_figures, run_benchmark
from benchmarks.megatron_model import MegatronBenchmark
from benchmarks.pairs import summarise_pairs
from trimtab.launch import launch


def step_times(gains: list[float], rounds: int, noise: float = 0.0) -> dict[str, list[float]]:
    """Plain steps of 1 s on even and 1.5 s on skewed routing. A round's noise is the same for all variants."""
    slower = 1 + noise * np.random.default_rng(0).random(rounds)
    gain_of_round = np.array([gains[number % len(gains)] for number in range(rounds)])
    seconds: dict[str, Any] = {"plain_balanced": 1.0, "planned_balanced": 1.02, "plain_skewed": 1.5}
    seconds["planned_skewed"] = 1.5 - 0.5 * gain_of_round
    return {name: (value * slower).tolist() for name, value in seconds.items()}


def test_the_gain_is_of_seeds_and_the_overhead_of_rounds() -> None:
    figures = summarise_pairs(step_times([1.0, 0.5, 0.8], 9), [{"replicas": number} for number in range(3)])
    assert [seed["seed"] for seed in figures["seeds"]] == [0, 1, 2]
    assert [seed["replicas"] for seed in figures["seeds"]] == [0, 1, 2]
    assert [seed["gain_captured"] for seed in figures["seeds"]] == pytest.approx([1.0, 0.5, 0.8])
    assert figures["seeds"][1]["median_s"]["planned_skewed"] == pytest.approx(1.25)
    assert figures["gain_captured"] == pytest.approx(2.3 / 3)
    assert figures["overhead_when_balanced"] == pytest.approx(0.02)
    # Without noise the intervals have no width.
    assert figures["gain_captured_interval"] == pytest.approx([2.3 / 3, 2.3 / 3])
    assert figures["overhead_when_balanced_interval"] == pytest.approx([0.02, 0.02])


def test_the_gain_of_all_seeds_is_weighted_by_what_the_skew_costs() -> None:
    """Seed 0 costs 1 s, of which all is saved; seed 1 costs 0.25 s, and nothing is."""
    times = {"plain_balanced": [1.0] * 4, "planned_balanced": [1.5] * 4}
    times |= {"plain_skewed": [2.0, 1.25] * 2, "planned_skewed": [1.0, 1.25] * 2}
    figures = summarise_pairs(times, [{}, {}])
    assert [seed["gain_captured"] for seed in figures["seeds"]] == [1.0, 0.0]
    assert figures["gain_captured"] == pytest.approx(1 / 1.25)
    assert figures["overhead_when_balanced"] == pytest.approx(0.5)


def test_noise_of_a_round_that_all_variants_share_hardly_moves_the_ratios() -> None:
    figures = summarise_pairs(step_times([0.9, 0.9], 40, noise=0.5), [{}, {}])
    assert figures["overhead_when_balanced"] == pytest.approx(0.02)
    assert figures["gain_captured"] == pytest.approx(0.9, rel=0.1)


def test_rounds_that_are_off_widen_the_interval_but_hardly_move_the_figure() -> None:
    times = step_times([0.9], 9)
    times["planned_balanced"][2:6] = [9.0] * 4
    figures = summarise_pairs(times, [{}])
    assert figures["overhead_when_balanced"] == pytest.approx(0.02)
    low, high = figures["overhead_when_balanced_interval"]
    assert low == pytest.approx(0.02)
    assert high == pytest.approx(8.0)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_small_run_plans_every_seed_and_computes_the_same_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "megatron.json"
    settings = MegatronBenchmark(
        pairs=2, seeds=2, json=path, sequences=1, sequence_length=256, layers=2, experts=8, top_k=2, hidden=128,
        width=512, zipf=2.0,
    )  # fmt: skip
    launch(run_benchmark, (settings,), ranks=2)
    figures = json.loads(path.read_text())
    assert figures["schema"] == "trimtab-bench-megatron-1"
    assert figures["megatron_version"]
    assert 0 < figures["worst_relative_error"] < 1e-5
    assert all(len(variant["step_s"]) == 2 for variant in figures["variants"].values())
    assert all(len(cpu_s) == 2 and min(cpu_s) > 0 for cpu_s in figures["cpu_s_by_rank"].values())
    assert [seed["seed"] for seed in figures["seeds"]] == [0, 1]
    assert all(seed["replicas"] > 0 and seed["max_vio_after"] < seed["max_vio_before"] for seed in figures["seeds"])
    for ratio in RATIOS:
        low, high = figures[f"{ratio}_interval"]
        assert low <= figures[ratio] <= high
    print_figures(figures, Console(width=160))
    assert "2 CPU ranks, 2 rounds" in " ".join(capsys.readouterr().out.split())


def test_skewed_routings_depend_on_the_seed_and_ranks_have_different_sequences() -> None:
    settings = MegatronBenchmark(pairs=2, sequence_length=64)
    first, second = settings.routings(2, 0), settings.routings(2, 1)
    # Even routing, then one for each pair.
    assert len(first) == 3
    shape = 64 * settings.sequences, settings.layers, settings.top_k
    assert [ids.shape for ids in first[0]] == [shape] * settings.micro_batches
    assert not np.array_equal(first[1][0], first[2][0])
    assert not np.array_equal(first[1][0], second[1][0])
    loads = [np.bincount(ids[:, 0].ravel(), minlength=settings.experts) for ids in first[0]]
    assert len(np.unique(loads)) == 1
