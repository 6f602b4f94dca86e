"""Stragglers of chosen instances, ratios of live step times, and a small run of `python -m benchmarks.live`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.live import POLICIES, LiveBenchmark, print_figures, run_benchmark, summarise_live
from benchmarks.live_stragglers import ChosenInstance, differences, straggler, straggler_cases, summarise_cases
from trimtab.launch import launch
from trimtab.runtime.program.physical_experts import InstanceReplicas

TINY = LiveBenchmark(
    pairs=2, seeds=1, ranks=(2, 4), presets=("qwen3-30b-math",), experts=32, straggler_layers=1, gemm_instances=1,
    gemm_hidden=8, gemm_width=8, tokens=256, sequence_length=64, layers=2, step_experts=8, top_k=2, hidden=64, width=64,
)  # fmt: skip


def instance(*, moves: bool) -> ChosenInstance:
    """Expert 0 of rank 0 has 6 rows of rank 0 and 4 of rank 1. On rank 1, a replica computes all or 3 of the 4."""
    counts_RE = np.array([[6, 1], [4, 1]])
    quotas_PR = np.array([[6, 4]]) if moves else np.array([[0, 3]])
    replicas = InstanceReplicas.chosen(np.array([0]), np.array([1]), quotas_PR)
    return ChosenInstance(counts_RE, np.array([0, 1]), replicas, moves)


def test_replicas_take_rows_from_homes() -> None:
    assert instance(moves=False).computed_RE.tolist() == [[7, 0], [3, 2]]
    assert instance(moves=True).computed_RE.tolist() == [[0, 0], [10, 2]]
    # Without replicas, 4 rows of rank 1 and 1 row of rank 0 are sent; 3 of the 4 then stay on their rank. Rows that
    # move are sent to their home first.
    assert instance(moves=False).sent_rows == 5 - 3
    assert instance(moves=True).sent_rows == 5 + 10
    # What the busiest rank has above the mean.
    assert straggler([np.array([10, 2]), np.array([4, 4])]) == pytest.approx(4 / 10)


def step_times(rounds: int) -> dict[str, list[float]]:
    times = {"off, even": 1.0, "off, skewed": 1.5, "foresight, skewed": 1.0}
    for policy, skewed in zip(POLICIES, (1.125, 1.4), strict=True):
        times |= {f"{policy}, skewed": skewed, f"{policy}, even": 1.02}
    return {name: [seconds] * rounds for name, seconds in times.items()}


def test_the_default_policy_is_the_headline() -> None:
    figures = summarise_live(step_times(4), seeds=2)
    assert figures["gain_captured"] == pytest.approx(0.75)
    assert figures["overhead_when_even"] == pytest.approx(0.02)
    gains = {name: policy["gain_captured"] for name, policy in figures["policies"].items()}
    assert gains == pytest.approx({"quota": 0.75, "feplb": 0.2, "foresight": 1.0})
    assert figures["policies"]["foresight"]["overhead_when_even"] is None


def test_cuts_outside_the_published_range_are_named() -> None:
    row = {"ranks": 4, "policy": "feplb", "token_straggler_cut": 0.9, "gemm_straggler_cut": 0.6}
    more, reasons = differences([row])
    assert "EP 4" in more
    assert "tokens straggler" not in more
    assert "90%, more than the published 51% to 70%" in more
    assert reasons.startswith("Reasons")
    assert differences([row | {"token_straggler_cut": 0.6}]) == []


def test_choices_from_counts_cut_stragglers() -> None:
    cases = straggler_cases(TINY)
    assert [(case["ranks"], case["policy"]) for case in cases] == [
        (ranks, policy) for ranks in (2, 4) for policy in ("fastermoe", "feplb", "quota", "feplb, fixed", "foresight")
    ]
    by_key = {(case["ranks"], case["policy"]): case for case in cases}
    for ranks in (2, 4):
        quota, feplb = by_key[ranks, "quota"], by_key[ranks, "feplb"]
        assert quota["token_straggler_before"] == feplb["token_straggler_before"] > 0.02
        assert quota["token_straggler"] < 0.006
        assert feplb["row_bytes"] > 0 >= quota["row_bytes"]
        assert by_key[ranks, "foresight"]["token_straggler"] < 0.02
    of_one, of_cases = (
        {row["policy"]: row["token_straggler_cut"] for row in rows if row["ranks"] == 4}
        for rows in (summarise_cases(cases), cases)
    )
    assert of_one == of_cases


@pytest.mark.nightly
@pytest.mark.slow
def test_a_small_run_times_all_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "live.json"
    settings = replace(TINY, json=path, ranks=(2,), pairs=1)
    launch(run_benchmark, (settings, straggler_cases(settings)), ranks=2)
    figures = json.loads(path.read_text())
    assert figures["gpu"] == "not measured"
    keys = {"ranks", "preset", "seed", "policy", "token_straggler_cut", "gemm_straggler_cut"}
    assert keys <= figures["cases"][0].keys()
    assert set(figures["policies"]) == {*POLICIES, "foresight"}
    assert figures["gain_captured"] == figures["policies"]["quota"]["gain_captured"]
    assert all(len(variant["step_s"]) == 1 for variant in figures["variants"].values())
    counted = figures["counted"]
    # FEPLB's second hop, there and back, forward and backward.
    assert counted["feplb"]["exchanges"] > counted["off"]["exchanges"] + 2
    # Planned layers exchange no counts.
    assert counted["foresight"]["exchanges"] < counted["quota"]["exchanges"]
    assert counted["off"]["weight_bytes"] == 0 < counted["quota"]["weight_bytes"]
    print_figures(figures, Console(width=160))
    assert "Time on a GPU is not measured" in " ".join(capsys.readouterr().out.split())
