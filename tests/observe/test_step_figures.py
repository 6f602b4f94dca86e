"""Counts and figures of a step against plain code and against `trimtab analyze`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.framework_batches import EXPERTS, LAYERS, TOP_K, random_sequences
from trimtab.analysis.balance import home_loads
from trimtab.analysis.fixed_placements import placed_loads
from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, ModelSpec
from trimtab.observe import step_figures
from trimtab.observe.step_figures import CountedStep, StepCounts, StepFigures
from trimtab.planner.planner import plan_schedule
from trimtab.trace import PRESETS, RoutingTrace, no_route, synthesize_preset

MODEL = ModelSpec("small", EXPERTS, TOP_K, 1024, 512, moe_layers=LAYERS)


def counted(parts: Sequence[RoutingTrace], ranks: int, budget: int) -> CountedStep:
    counts = StepCounts(ranks, budget, parts[0].part(0, 0))
    for part in parts:
        counts.add(part)
    found = counts.finish()
    assert found is not None
    return found


def trace_of(sequences: Sequence[Array]) -> RoutingTrace:
    return RoutingTrace.from_sequences(sequences, num_experts=EXPERTS)


@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.sampled_from([1, 2, 4, 8]), st.integers(1, 120))
def test_every_token_is_counted_where_its_sequence_is(seed: int, count: int, ranks: int, budget: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = [ids.astype(np.uint8) for ids in random_sequences(rng, count)]
    for ids in sequences[::3]:
        ids[1:, 1] = no_route(EXPERTS)
    splits = np.sort(rng.integers(0, count, 2)).tolist()
    parts = [trace_of(part) for part in (sequences[: splits[0]], sequences[splits[0] :]) if part]
    step = counted(parts, ranks, budget)
    counts_MLRE = np.zeros_like(step.workload.token_counts_MLRE)
    unknown_MLR = np.zeros_like(step.workload.unknown_MLR)
    # A last micro-step with few tokens is left out.
    kept = sequences[: len(step.lengths)]
    assert [len(ids) for ids in kept] == step.lengths.tolist()
    for ids, m, r in zip(kept, step.schedule.micro_step, step.schedule.rank, strict=True):
        for row in ids:
            for layer, chosen in enumerate(row):
                if chosen[0] == no_route(EXPERTS):
                    unknown_MLR[m, layer, r] += TOP_K
                else:
                    counts_MLRE[m, layer, r, chosen] += 1
    np.testing.assert_array_equal(step.workload.token_counts_MLRE, counts_MLRE)
    np.testing.assert_array_equal(step.workload.unknown_MLR, unknown_MLR)
    tokens_MR, sequences_MR = np.zeros((2, step.workload.num_micro_steps, ranks), np.int64)
    np.add.at(tokens_MR, (step.schedule.micro_step, step.schedule.rank), step.lengths)
    np.add.at(sequences_MR, (step.schedule.micro_step, step.schedule.rank), 1)
    assert ((tokens_MR <= budget) | (sequences_MR == 1)).all()
    if left_out := sum(len(ids) for ids in sequences[len(kept) :]):
        assert left_out < step_figures.LEAST_FILLED * tokens_MR.sum() / len(tokens_MR)


@pytest.mark.parametrize(("last", "kept"), [(4, 2), (5, 3), (6, 3)])
def test_a_last_micro_step_below_half_of_the_others_is_left_out(last: int, kept: int) -> None:
    sequences = [np.broadcast_to([1, 2], (tokens, LAYERS, TOP_K)).astype(np.uint8) for tokens in (10, 10, last)]
    assert counted([trace_of(sequences)], 1, 10).workload.num_micro_steps == kept


def test_counts_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_figures, "COUNT_BYTES", 3 * 2 * LAYERS * EXPERTS * 4)
    sequences = [np.broadcast_to([1, 2], (10, LAYERS, TOP_K)).astype(np.uint8)] * 9
    counts = StepCounts(2, 10, trace_of(sequences).part(0, 0))
    for first in range(0, 9, 3):
        counts.add(trace_of(sequences[first : first + 3]))
    step = counts.finish()
    assert step is not None
    assert step.workload.num_micro_steps == 3
    assert counts.left_out == 3


def test_figures_of_a_step_that_is_easy_to_compute() -> None:
    """Two ranks; all tokens use experts 0 and 1 of the first, in every layer."""
    ids = np.broadcast_to([0, 1], (10, LAYERS, TOP_K)).astype(np.uint8)
    step = counted([trace_of([ids] * 4)], 2, 20)
    figures = StepFigures(ClusterSpec(2, 2, 2), MODEL)
    first, second = figures.of(step), figures.of(step)
    for found in (first, second):
        assert found["idle_share"] == pytest.approx(0.5)
        assert found["max_vio"] == found["max_vio_worst"] == pytest.approx(1.0)
        assert found["peak_rows"] == 80
        assert found["tokens_per_micro_step"] == 40
        assert found["unknown_share"] == 0
        assert 0 < found["lost_share"] < 0.5
    assert "renumber_recovers" not in first
    # Past loads tell it: one of the two experts moves.
    assert second["renumber_recovers"] == second["eplb_recovers"] == pytest.approx(1.0)
    assert second["renumber_gain"] == pytest.approx(second["lost_share"])


def test_homes_and_plans_follow_the_steps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pasts: list[Any] = []
    loads_PLE: list[Array] = []
    figures = StepFigures(ClusterSpec(4, 4, 2), None)

    def planned(*args: Any, past_PLE: Array | None, **options: Any) -> Any:
        pasts.append([] if past_PLE is None else past_PLE.tolist())
        return plan_schedule(*args, past_PLE=past_PLE, **options)

    monkeypatch.setattr(step_figures, "plan_schedule", planned)
    for seed in range(step_figures.PAST_STEPS + 2):
        step = counted([trace_of(random_sequences(np.random.default_rng(seed), 12))], 4, 64)
        found, counts_MLE = figures.of(step), step.workload.token_counts_MLRE.sum(axis=2)
        assert pasts[-1] == [loads_LE.tolist() for loads_LE in loads_PLE[-step_figures.PAST_STEPS :]]
        for name, slots in (("renumber", 0), ("eplb", 2)) if loads_PLE else ():
            before, after = (
                loads_MLR.max(axis=2).sum() - loads_MLR.mean(axis=2).sum()
                for loads_MLR in (home_loads(counts_MLE, 4), placed_loads(counts_MLE, loads_PLE[-1], 4, slots))
            )
            assert found[f"{name}_recovers"] == pytest.approx(1 - after / before)
        loads_PLE.append(counts_MLE.sum(axis=0))


def test_one_hot_expert_is_divided_by_replicas_alone() -> None:
    """Every token uses expert 0, and one of those that other ranks hold."""
    ids_NK = np.stack([np.zeros(60, np.int64), 4 + np.arange(60) % 12], axis=1)
    ids_TLK = np.broadcast_to(ids_NK[:, None], (60, LAYERS, 2)).astype(np.uint8)
    step = counted([trace_of([ids_TLK] * 4)], 4, 60)
    figures = StepFigures(ClusterSpec(4, 4, 2), MODEL)
    figures.of(step)
    found = figures.of(step)
    assert found["idle_share"] == pytest.approx(0.5)
    assert found["renumber_recovers"] == 0
    assert found["eplb_recovers"] > 0.5


def test_even_routing_has_nothing_to_recover() -> None:
    ids = np.stack([np.arange(token, token + 2) % EXPERTS for token in range(16)])
    ids_TLK = np.broadcast_to(ids[:, None], (16, LAYERS, 2)).astype(np.uint8)
    figures = StepFigures(ClusterSpec(2, 2, 2), MODEL)
    for _ in range(2):
        found = figures.of(counted([trace_of([ids_TLK] * 4)], 2, 32))
    assert found["idle_share"] == found["max_vio"] == 0
    assert {found[f"{name}_{what}"] for name in ("renumber", "eplb", "plan") for what in ("recovers", "gain")} == {0}


def test_figures_are_near_those_of_analyze() -> None:
    """Which sequences share a micro-step differs."""
    from trimtab import Run, analyze

    recovered: dict[str, float] = dict.fromkeys(("renumber", "eplb", "plan"), 0.0)
    for seed in range(4):
        trace = synthesize_preset(
            PRESETS["qwen3-30b-math"], num_sequences=256, mean_length=256, max_length=1024, num_layers=6,
            num_experts=128, top_k=8, num_steps=2, seed=seed,
        )  # fmt: skip
        expected = analyze(trace, Run(ranks=8, token_budget=2048)).analysis
        figures = StepFigures(ClusterSpec(8, 8, 2), None)
        for number in range(2):
            chosen = trace.select(np.flatnonzero(trace.steps == number))
            found = figures.of(counted([chosen], 8, 2048))
        assert found["idle_share"] == pytest.approx(expected.total.lost, rel=0.1)
        assert found["max_vio"] == pytest.approx(expected.total.max_vio.mean, rel=0.1)
        past = {each.name: each.recovered_fraction for each in expected.placements.strategies}
        assert found["renumber_recovers"] == pytest.approx(past["homes_from_past"], abs=0.05)
        assert found["eplb_recovers"] == pytest.approx(past["replicas_from_past"], abs=0.05)
        for name in recovered:
            recovered[name] += found[f"{name}_recovers"] / 4
    assert recovered["plan"] > 0.98
    assert recovered["eplb"] > recovered["renumber"] + 0.03
