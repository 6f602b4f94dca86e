"""Figures against sums by hand and plain loops."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab import write_trace
from trimtab.analysis import CountedTrace, analyze, count_trace
from trimtab.analysis.analysis import figures
from trimtab.analysis.answer import answer, cost, notes, where
from trimtab.analysis.balance import balance, overlap, rank_numbers, ratios, stability
from trimtab.analysis.domains import alikeness, domain_skew
from trimtab.analysis.foresight import foresight, placed_loads
from trimtab.analysis.hot import hot_experts, hot_mask
from trimtab.analysis.price import copy_seconds, price
from trimtab.cluster import load_cluster, load_model
from trimtab.cluster.operations import OperationCosts
from trimtab.planner import Placement, Schedule, SequenceCounts, Workload
from trimtab.policies import POLICIES, look
from trimtab.simulator.comparison import Situation, simulate_policy
from trimtab.simulator.work import rank_work
from trimtab.trace import PRESETS, TraceReader, synthesize_preset


def counted_of(counts_MLE: Any, steps: Any = None, **changes: Any) -> CountedTrace:
    counts = np.asarray(counts_MLE, np.int32)
    tokens = int(counts[:, 0].sum())
    trace = CountedTrace(
        counts_FLE=counts, parts=1, step_M=np.zeros(len(counts), int) if steps is None else np.asarray(steps),
        counts_DLE=counts.sum(axis=0, dtype=np.int64)[None], domains=("",), layer_indices=np.arange(counts.shape[1]),
        token_budget=tokens, num_tokens=tokens, num_sequences=len(counts), unknown_routes=0,
        length_squares=tokens, top_k=1, model="",
    )  # fmt: skip
    return replace(trace, **changes)


def random_counts(seed: int, micro_steps: int = 6, layers: int = 3, experts: int = 8) -> np.ndarray:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 40, (micro_steps, layers, experts)) ** 2
    counts[rng.random(counts.shape) < 0.2] = 0
    counts[rng.integers(micro_steps), rng.integers(layers)] = 0
    return counts


def test_balance_by_hand() -> None:
    found = balance(np.array([[2, 2], [3, 1], [0, 0], [6, 2]]))
    assert found.instances == 3
    assert found.max_over_mean.mean == pytest.approx((1 + 1.5 + 1.5) / 3)
    assert (found.max_over_mean.p50, found.max_over_mean.worst, found.max_vio.worst) == (1.5, 1.5, 0.5)
    assert found.balancedness.mean == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    assert found.lost == pytest.approx(1 - (2 + 2 + 4) / (2 + 3 + 6))
    nothing = balance(np.zeros((2, 4), int))
    assert (nothing.instances, nothing.max_over_mean.mean, nothing.lost) == (0, 1.0, 0.0)
    assert np.isnan(ratios(np.zeros((1, 2)))).all()


def test_numbers_of_ranks_are_powers_of_two_that_divide_and_the_given_one() -> None:
    assert rank_numbers(128, 16) == [2, 4, 8, 16, 32, 64, 128]
    assert rank_numbers(256, 8) == [2, 4, 8, 16, 32, 64]
    assert rank_numbers(160, 10) == [2, 4, 8, 10, 16, 32]
    assert rank_numbers(15, 5) == [5]
    assert rank_numbers(1, 1) == [1]


def test_overlap_by_hand() -> None:
    assert overlap(np.array([3, 1, 0]), np.array([30, 10, 0])) == 1
    assert overlap(np.array([1, 0]), np.array([0, 1])) == 0
    assert overlap(np.array([3, 1]), np.array([1, 3])) == 0.5
    assert np.isnan(overlap(np.array([0, 0]), np.array([1, 3])))


def test_a_step_may_be_stable_where_its_micro_steps_are_not() -> None:
    # Ranks 0 and 1 take turns; over two micro-steps they are even.
    turns = np.array([[[3, 1]], [[1, 3]], [[3, 1]], [[1, 3]]])
    found = stability(turns, np.array([0, 2, 4]), 2)
    assert (found.step_max_over_mean, found.micro_step_max_over_mean) == (1.0, 1.5)
    assert (found.busiest_rank_changes, found.overlap_micro_steps) == (0.5, 0.5)
    assert (found.overlap_steps, found.overlap_halves) == (1.0, 0.5)
    lone = stability(turns[:1], np.array([0, 1]), 2)
    assert (lone.overlap_micro_steps, lone.overlap_steps, lone.overlap_halves) == (None, None, None)


def test_foresight_by_hand() -> None:
    # Experts 0 and 1 of rank 0 are hot in both steps: other homes fix it for good.
    hot = np.array([[[4, 4, 0, 0]]] * 4)
    found = {way.name: way for way in foresight(hot, np.array([0, 2, 4]), 2).ways}
    assert found["static"].lost == pytest.approx(0.5)
    assert (found["homes_from_past"].lost, found["homes_from_past"].won_back) == (0.0, 1.0)
    assert found["homes_from_step"].max_over_mean == 1.0
    # What was hot is not any more: homes by the past put 0 and 2 together.
    drift = np.array([[[4, 4, 3, 3]], [[4, 0, 4, 0]]])
    found = {way.name: way for way in foresight(drift, np.array([0, 1, 2]), 2).ways}
    assert found["homes_from_past"].lost == pytest.approx(0.5)
    assert found["homes_from_step"].lost == 0.0
    assert found["static"].lost == 0.0
    assert found["static"].won_back is None
    # One step: its first half is the past of the second. Within the second, 0 and 1 take turns with 2 and 3.
    turns = np.array([[[8, 8, 0, 0]], [[8, 8, 0, 0]], [[8, 8, 0, 0]], [[0, 0, 8, 8]]])
    compared = foresight(turns, np.array([0, 4]), 2)
    assert (compared.history, compared.instances) == ("half", 2)
    found = {way.name: way for way in compared.ways}
    assert found["static"].lost == pytest.approx(0.5)
    assert found["static"].lost_in_sum == 0.0
    assert found["homes_from_past"].won_back == 1.0
    lone = foresight(turns[:1], np.array([0, 1]), 2)
    assert (lone.history, lone.best("past")) == (None, None)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.sampled_from([1, 2, 4, 8]), slots=st.integers(0, 2))
def test_placed_loads_are_what_the_eplb_policy_plans(seed: int, ranks: int, slots: int) -> None:
    counts = random_counts(seed)
    loads = placed_loads(counts, counts.sum(axis=0), ranks, slots)
    assert loads.sum(axis=-1) == pytest.approx(counts.sum(axis=-1))
    sequences = SequenceCounts(counts.astype(np.uint16), counts[:, 0].sum(axis=1), np.ones(len(counts), bool))
    schedule = Schedule(np.arange(6, dtype=np.int32), np.zeros(6, np.int32), np.zeros(6, np.int32), ranks)
    cluster = load_cluster("h100x8", ranks=ranks, slots_per_rank=slots, ranks_per_node=ranks)
    homes = Placement.contiguous(3, 8, ranks)
    policy = POLICIES["eplb_oracle"]
    plan = policy.plan(look(policy, sequences, schedule, homes, cluster, token_budget=10**6))
    planned = plan.rank_loads(Workload.from_sequences(sequences, schedule))
    # The policy deals out whole tokens, each expert's within one of even.
    assert np.abs(planned - loads).max() <= counts.shape[-1]


def plain_hot(counts: np.ndarray, starts: list[int]) -> tuple[float, list[int], float | None]:
    """Hot experts an instance, lengths of runs, and how many of the hot stay so."""
    runs: list[int] = []
    hot, stays, could = 0, 0, 0
    instances = sum(bool(counts[m, layer].any()) for m in range(len(counts)) for layer in range(counts.shape[1]))
    for layer in range(counts.shape[1]):
        for expert in range(counts.shape[2]):
            length = 0
            for m in range(len(counts)):
                is_hot = counts[m, layer, expert] > 2 * counts[m, layer].mean()
                hot += is_hot
                if m in starts and length:
                    runs.append(length)
                    length = 0
                if length:
                    could += 1
                    stays += is_hot
                if is_hot:
                    length += 1
                elif length:
                    runs.append(length)
                    length = 0
            if length:
                runs.append(length)
    return hot / instances, runs, stays / could if could else None


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), micro_steps=st.integers(1, 12), cut=st.integers(0, 12))
def test_hot_experts_against_a_loop(seed: int, micro_steps: int, cut: int) -> None:
    counts = random_counts(seed, micro_steps)
    if not counts.any():
        return
    starts = sorted({0, min(cut, micro_steps - 1)})
    found = hot_experts(counts, np.array([*starts, micro_steps]))
    per_instance, runs, stay = plain_hot(counts, starts)
    assert found.per_instance == pytest.approx(per_instance)
    assert found.stay == (pytest.approx(stay) if stay is not None else None)
    low = 0
    for longest, count in found.runs:
        assert count == sum(low < run <= (longest or 10**9) for run in runs)
        low = longest or low
    assert found.mean_run == pytest.approx(np.mean(runs) if runs else 0)
    assert max((expert.longest_run for expert in found.hottest), default=0) <= max(runs, default=0)


def test_hot_means_more_than_twice_the_mean() -> None:
    assert hot_mask(np.array([4, 0, 0, 4])).tolist() == [False] * 4
    assert hot_mask(np.array([5, 0, 0, 3])).tolist() == [True, False, False, False]
    assert not hot_mask(np.zeros(4, int)).any()
    found = hot_experts(np.array([[[5, 0, 0, 3]], [[9, 1, 0, 0]], [[0, 0, 0, 1]]]), np.array([0, 2, 3]))
    assert (found.stay, found.mean_run) == (1.0, 1.5)
    assert found.token_part == pytest.approx(15 / 19)
    assert found.alike_steps == 0.0
    assert found.alike_halves == 1.0
    first = found.hottest[0]
    assert (first.layer, first.expert, first.longest_run) == (0, 0, 2)
    assert first.hot_part == pytest.approx(2 / 3)


def test_domains_by_hand() -> None:
    counts = np.array([[[6, 2, 0, 0]], [[2, 2, 2, 2]], [[0, 0, 0, 0]]])
    first, second = domain_skew(counts, ("maths", "code", "none"), 2)
    assert (first.token_part, first.busier_half_share, first.hottest_over_mean, first.max_over_mean) == (0.5, 1, 3, 2)
    assert (second.busier_half_share, second.hottest_over_mean, second.max_over_mean) == (0.5, 1, 1)
    assert alikeness(counts) == pytest.approx(np.array([[1, 0.5, 0], [0.5, 1, 0], [0, 0, 0]]))


def test_prices_of_experts_are_the_simulators() -> None:
    counts = random_counts(1)
    cluster = load_cluster("h100x8", ranks=4, slots_per_rank=0, ranks_per_node=2)
    model = load_model("qwen3-30b-a3b")
    costs = OperationCosts.of(cluster, model, moe_layers=3)
    sequences = SequenceCounts(counts.astype(np.uint16), counts[:, 0].sum(axis=1), np.ones(6, bool))
    schedule = Schedule(np.arange(6, dtype=np.int32), np.zeros(6, np.int32), np.zeros(6, np.int32), 4)
    policy = POLICIES["static"]
    view = look(policy, sequences, schedule, Placement.contiguous(3, 8, 4), cluster, token_budget=10**6)
    work = rank_work(policy.plan(view), Workload.from_sequences(sequences, schedule), costs)
    assert copy_seconds(counts, costs).reshape(6, 3, 4, 2).sum(axis=-1) == pytest.approx(work.experts_MLR)
    even = np.full((2, 3, 8), 1024)
    tokens = {"num_steps": 1, "num_tokens": 1024 * 8, "length_squares": 10**6}
    assert price(even, cluster, model, **tokens).lost_s == pytest.approx(0)
    skewed = even.copy()
    skewed[:, 0, :2] *= 4
    found = price(skewed, cluster, model, **tokens)
    assert 0 < found.lost_s < found.step_s
    assert found.lost_L[1:] == pytest.approx((0, 0))
    twice = price(
        np.concatenate([skewed, skewed]), cluster, model, num_steps=2, num_tokens=2**14, length_squares=2 * 10**6
    )
    assert twice.step_s == pytest.approx(found.step_s)
    assert twice.lost_L == pytest.approx(found.lost_L)


def test_the_estimate_is_near_what_the_simulator_says(tmp_path: Path) -> None:
    trace = synthesize_preset(
        PRESETS["rl-mixed"], num_sequences=128, mean_length=256, max_length=512, num_layers=2, num_experts=128, top_k=8
    )
    write_trace(trace, tmp_path / "t.parquet")
    model = load_model("qwen3-30b-a3b")
    for ranks, per_node in ((8, 8), (16, 4), (16, 16)):
        cluster = load_cluster("h100x8", ranks=ranks, slots_per_rank=0, ranks_per_node=per_node)
        counted = count_trace(TraceReader(tmp_path / "t.parquet"), ranks=ranks, token_budget=1024)
        found = analyze(counted, ranks=ranks, ranks_per_node=per_node, cluster=cluster, model=model).price
        assert found
        situation = Situation(cluster, model, SequenceCounts.from_trace(trace), (), 1024)
        static_s, even_s = (simulate_policy(situation, name).simulated.step_time_s for name in ("static", "balanced"))
        assert found.lost_s == pytest.approx(static_s - even_s, rel=0.05)
        if ranks == per_node:
            # Between nodes the sums of gradients stick out of so short a step.
            assert found.step_s == pytest.approx(static_s, rel=0.01)


@pytest.mark.parametrize(
    ("counts", "steps", "words"),
    [
        ([[[4, 4, 4, 4]]] * 4, None, "next to nothing to gain"),
        (
            [[[8, 8, 0, 0]]] * 4,
            None,
            "placement by the first half of the step would win back 100% of that, so a balancer",
        ),
        ([[[8, 8, 0, 0]]] * 4, [0, 0, 1, 1], "placement by the step before would win back 100%"),
        ([[[8, 8, 0, 0]]], None, "All tokens fit one micro-step"),
        ([[[9, 1, 1, 1]], [[1, 9, 1, 1]], [[1, 1, 9, 1]], [[1, 1, 1, 9]]] * 2, None, "foresight is worth it"),
    ],
)
def test_the_answer_is_honest(counts: Any, steps: Any, words: str) -> None:
    analysis = analyze(counted_of(counts, steps), ranks=2)
    assert words in answer(analysis)
    assert cost(analysis) == ""
    assert where(analysis) == ""
    assert "nan" not in " ".join((answer(analysis), *notes(analysis)))


@pytest.mark.parametrize(("tokens", "words"), [(63, "with 63 for the mean expert it makes few"), (64, "to about 1.00")])
def test_a_plan_is_not_said_to_level_what_no_copy_is_worth(tokens: int, words: str) -> None:
    analysis = analyze(counted_of([[[tokens] * 4]] * 2), ranks=2)
    assert words in notes(analysis)[-1]


def test_layers_that_lose_are_named() -> None:
    counts = np.full((4, 8, 4), 10)
    counts[:, 5, 0] = 100
    analysis = analyze(counted_of(counts), ranks=4)
    assert where(analysis).startswith("Some layers lose more than others: the worst quarter (5, ")
    assert analysis.lost_share_L.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    micro_steps=st.integers(1, 5),
    layers=st.integers(1, 3),
    ranks=st.sampled_from([1, 2, 8]),
    steps=st.integers(1, 3),
)
def test_figures_are_numbers_whatever_the_trace(
    seed: int, micro_steps: int, layers: int, ranks: int, steps: int
) -> None:
    counts = random_counts(seed, micro_steps, layers)
    if not counts.any():
        return
    analysis = analyze(counted_of(counts, np.arange(micro_steps) * steps // micro_steps), ranks=ranks)
    content = json.dumps(figures(analysis), allow_nan=False)
    assert json.loads(content)["micro_steps"] == micro_steps
    said = " ".join((answer(analysis), where(analysis), *notes(analysis)))
    assert "nan" not in said
    assert said.startswith("On " if ranks > 1 else "One rank")
