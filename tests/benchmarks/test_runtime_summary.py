"""Ratios of step times over seeds, and a small run of `python -m benchmarks.runtime`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.runtime import RuntimeBenchmark, print_figures, run_benchmark, summarise_steps
from helpers.rank_pool import on_ranks

RATIOS = ("gain_captured", "fraction_of_balanced", "overhead_when_balanced")


def step_times(gains: list[float], noise: float = 0.0, rounds: int = 5) -> dict[tuple[int, str], list[float]]:
    """Steps that take 1 s with even routing and 1.5 s without a plan. A round's noise is the same for all variants."""
    slower_SR = 1 + noise * np.random.default_rng(0).random((len(gains), rounds))
    return {
        (seed, name): (seconds * slower_SR[seed]).tolist()
        for seed, gain in enumerate(gains)
        for name, seconds in {"static": 1.5, "trimtab": 1.5 - 0.5 * gain, "balanced": 1.0, "native": 1.25}.items()
    }


def test_every_seed_has_its_ratios_and_all_seeds_their_median_and_range() -> None:
    figures = summarise_steps(step_times([1.0, 0.5, 0.8]), [[1.2, 1.4], [1.1, 1.1], [1.5, 1.7]])
    assert [seed["seed"] for seed in figures["seeds"]] == [0, 1, 2]
    assert [seed["gain_captured"] for seed in figures["seeds"]] == pytest.approx([1.0, 0.5, 0.8])
    assert figures["gain_captured"] == pytest.approx(0.8)
    assert figures["gain_captured_range"] == pytest.approx([0.5, 1.0])
    # Without noise the interval has no width.
    assert figures["gain_captured_interval"] == pytest.approx([0.8, 0.8])
    assert [seed["fraction_of_balanced"] for seed in figures["seeds"]] == pytest.approx([1.0, 1 / 1.25, 1 / 1.1])
    assert figures["overhead_when_balanced"] == pytest.approx(1 / 1.25 - 1)
    assert figures["overhead_when_balanced_range"] == pytest.approx([-0.2, -0.2])
    assert figures["static_max_over_mean"] == pytest.approx(1.3)
    assert figures["static_max_over_mean_range"] == pytest.approx([1.1, 1.6])
    assert figures["seeds"][1]["median_s"] == {"static": 1.5, "trimtab": 1.25, "balanced": 1.0, "native": 1.25}
    assert "speedup_vs_node_blind" not in figures


def test_noise_of_a_round_that_all_variants_share_cancels() -> None:
    figures = summarise_steps(step_times([0.9, 0.9, 0.9], noise=0.5), [[1.2]] * 3)
    for ratio, value in zip(RATIOS, (0.9, 1 / 1.05, -0.2), strict=True):
        low, high = figures[f"{ratio}_interval"]
        assert low <= figures[ratio] <= high
        # A round is drawn for all variants together.
        assert high - low < 1e-9
        assert figures[ratio] == pytest.approx(value, rel=0.1)


def test_a_round_that_is_off_widens_the_interval_but_hardly_moves_the_figure() -> None:
    times = step_times([0.8, 0.8])
    times[0, "trimtab"][2] = 9.0
    times[1, "static"][0] = 9.0
    figures = summarise_steps(times, [[1.2], [1.2]])
    assert figures["gain_captured"] == pytest.approx(0.8)
    low, high = figures["gain_captured_interval"]
    assert low < 0.8 or high > 0.8


def test_several_nodes_are_compared_with_a_plan_that_ignores_them() -> None:
    times = step_times([1.0, 1.0])
    for seed in range(2):
        times[seed, "node-blind"] = [1.25] * 5
    assert summarise_steps(times, [[1.2], [1.2]])["speedup_vs_node_blind"] == pytest.approx(1.25)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_small_run_has_every_seed_and_explains_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runtime.json"
    settings = RuntimeBenchmark(
        tokens=256, rounds=2, json=path, seeds=2, layers=2, hidden=64, width=128, experts=16, sequence_length=64
    )
    on_ranks(run_benchmark, (settings,), ranks=2)
    figures = json.loads(path.read_text())
    assert figures["settings"]["seeds"] == 2
    assert list(figures["policies"]) == ["static", "trimtab", "balanced", "native"]
    # Two rounds of two seeds.
    assert all(len(policy["step_s"]) == 4 for policy in figures["policies"].values())
    skews = [seed["static_max_over_mean"] for seed in figures["seeds"]]
    assert skews[0] != skews[1]
    assert all(len(layers) == 2 for layers in skews)
    for ratio in RATIOS:
        low, high = figures[f"{ratio}_range"]
        assert low <= figures[ratio] <= high
        assert {seed[ratio] for seed in figures["seeds"]} == {low, high}
    print_figures(figures, Console(width=160))
    text = " ".join(capsys.readouterr().out.split())
    assert "skewed routing of seeds 0 to 1" in text
    assert "It says nothing about GPUs" in text
    assert "can exceed 1" in text


def test_skewed_routing_depends_on_the_seed_and_even_routing_does_not() -> None:
    benchmark = RuntimeBenchmark()
    (skewed, even, schedule), (other, other_even, other_schedule) = benchmark.draw(2, 0), benchmark.draw(2, 1)
    assert not np.array_equal(skewed.expert_ids, other.expert_ids)
    assert np.array_equal(even.expert_ids, other_even.expert_ids)
    assert np.array_equal(schedule.rank, other_schedule.rank)
    assert np.array_equal(skewed.expert_ids, benchmark.draw(2)[0].expert_ids)
