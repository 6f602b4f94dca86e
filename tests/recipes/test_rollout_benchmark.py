"""The prediction of a pipeline from times of its parts, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rollout_figures import MICRO_BATCHES, Run, draw, summarise
from recipes.disaggregated_rollout.benchmark import RolloutBenchmark, expert_weights


def run_of(calls: int, attention_s: float, expert_s: float, message_s: float, micro_batches: int = 1) -> Run:
    """One after another, or as fast as the slower side."""
    attention = [(i % micro_batches, i * 1.0, i + attention_s) for i in range(calls)]
    experts = [(i % micro_batches, i + 0.5, i + 0.5 + expert_s) for i in range(calls)]
    cycle = attention_s + expert_s + 2 * message_s if micro_batches == 1 else max(attention_s, expert_s)
    return Run(calls * cycle, attention, experts)


def test_times_of_one_micro_batch_predict_more() -> None:
    # Half of the sequences take half of the time; a message always takes 0.1 s.
    parts = {m: run_of(10, 0.4 / m, 0.2 / m, 0.1) for m in MICRO_BATCHES}
    results = {("part", m): [run] for m, run in parts.items()}
    results |= {("pipeline", 1): [parts[1]], ("pipeline", 2): [run_of(20, 0.2, 0.1, 0.1, 2)]}
    results |= {("pipeline", 3): [run_of(30, 0.4 / 3, 0.2 / 3, 0.1, 3)]}
    figures = summarise(results, tokens=60)
    for m, per_call in ((1, 0.8), (2, 0.5), (3, 0.4)):
        of_m = figures[str(m)]
        assert of_m["attention_s"] == pytest.approx(0.4 / m)
        assert of_m["expert_s"] == pytest.approx(0.2 / m)
        assert of_m["message_s"] == pytest.approx(0.1)
        assert of_m["predicted_tokens_per_s"] == pytest.approx(60 / (10 * per_call))
    assert figures["2"]["speedup"] == pytest.approx(2)
    assert figures["2"]["error"] == pytest.approx(4 / 5 - 1)
    assert figures["3"]["error"] == pytest.approx(0)


def test_the_picture_is_of_the_middle_of_a_run(tmp_path: Path) -> None:
    draw(tmp_path / "pipeline.svg", {m: run_of(40 * m, 0.4, 0.2, 0.1, m) for m in MICRO_BATCHES}, layers=4)
    assert (tmp_path / "pipeline.svg").read_text().count("3 micro-batches") == 1


def test_the_hottest_expert_has_most_tokens_of_a_layer() -> None:
    weights = expert_weights(RolloutBenchmark())
    assert weights.shape == (4, 8)
    assert (weights.max(axis=1) > weights.sum(axis=1) / 2).all()
