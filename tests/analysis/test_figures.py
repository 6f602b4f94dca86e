"""Figures of an analysis equal values worked out by hand, and plain loops."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.trace_counts import random_counts, trace_counts_of
from trimtab.analysis import TraceCounts, analyze
from trimtab.analysis.analysis import figures
from trimtab.analysis.balance import (
    balance,
    by_size,
    domain_overlap,
    domain_skew,
    lost_part,
    max_over_mean_or_nan,
    overlap,
    rank_numbers,
    stability,
)
from trimtab.analysis.cost_estimate import PERMUTATIONS
from trimtab.analysis.fixed_placements import PlacementComparison, PlacementStrategy, compare_placements, placed_loads
from trimtab.analysis.hot_experts import hot_experts, hot_mask
from trimtab.analysis.summary import answer
from trimtab.cluster import ClusterSpec, load_cluster, load_model
from trimtab.cluster.operations import OperationCosts
from trimtab.planner import Placement, Schedule, SequenceCounts, StepPlan, Workload
from trimtab.planner.plan.rank_work import rank_work
from trimtab.policies import POLICIES, make_view
from trimtab.trace.numbering import permute_experts, random_orders


def test_balance_of_given_loads() -> None:
    found = balance(np.array([[2, 2], [3, 1], [0, 0], [6, 2]]))
    assert found.instances == 3
    assert found.max_over_mean.mean == pytest.approx((1 + 1.5 + 1.5) / 3)
    assert found.balancedness.mean == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    assert found.lost == pytest.approx(1 - (2 + 2 + 4) / (2 + 3 + 6))
    nothing = balance(np.zeros((2, 4), int))
    assert (nothing.instances, nothing.max_over_mean.mean, nothing.lost) == (0, 1.0, 0.0)
    assert np.isnan(max_over_mean_or_nan(np.zeros((1, 2)))).all()
    # 101 instances, busiest over mean from 1 to 2.
    found = balance(np.array([[100 + i, 100 - i] for i in range(101)]))
    assert [found.max_over_mean.p50, found.max_over_mean.p99, found.max_over_mean.worst] == [1.5, 1.99, 2]
    assert [found.max_vio.p50, found.max_vio.p99, found.max_vio.worst] == pytest.approx([0.5, 0.99, 1])
    even = found.balancedness
    assert [even.p50, even.p99, even.worst] == pytest.approx([1 / 1.5, 1 / 1.99, 0.5])


@pytest.mark.parametrize(
    ("counted", "factors", "tokens"),
    [
        # Tokens are those of the layer that knows most.
        (trace_counts_of([[[0, 0], [3, 1]]] * 4), [1, 2, None], [4, 8, 16]),
        # A size equal to whole steps is listed once.
        (trace_counts_of([[[3, 1]]]), [1, None], [4, 4]),
        (trace_counts_of([[[3, 1]]] * 4, [0, 0, 1, 1]), [1, None], [4, 8]),
        # Every token is two rows.
        (trace_counts_of([[[4, 4]]] * 2, top_k=2), [1, None], [4, 8]),
    ],
)
def test_sizes_of_micro_steps(counted: TraceCounts, factors: list[float | None], tokens: list[int]) -> None:
    sizes = by_size(counted, [2])
    assert ([size.factor for size in sizes], [size.tokens for size in sizes]) == (factors, tokens)


def test_larger_micro_steps_stay_inside_their_step() -> None:
    """Of three micro-steps in each step the last is left out, where two are joined."""
    counts = [[[4, 0]], [[0, 4]], [[4, 0]], [[0, 4]], [[4, 0]], [[4, 0]]]
    found = {size.factor: size for size in by_size(trace_counts_of(counts, [0, 0, 0, 1, 1, 1]), [2])}
    assert list(found) == [1, 2, None]
    assert (found[2].micro_steps, found[2].tokens, found[2].by_ranks[2].max_over_mean.mean) == (2, 8, 1.0)
    assert found[None].by_ranks[2].max_over_mean.mean == pytest.approx(4 / 3)


def test_rank_numbers_are_powers_of_two_that_divide_the_experts_and_the_given_number() -> None:
    assert rank_numbers(128, 16) == [2, 4, 8, 16, 32, 64, 128]
    assert rank_numbers(256, 8) == rank_numbers(256, 2) == [2, 4, 8, 16, 32, 64]
    assert rank_numbers(160, 10) == [2, 4, 8, 10, 16, 32]
    assert (rank_numbers(15, 5), rank_numbers(1, 1)) == ([5], [1])


def test_overlap_of_given_distributions() -> None:
    assert overlap(np.array([3, 1, 0]), np.array([30, 10, 0])) == 1
    assert overlap(np.array([1, 0]), np.array([0, 1])) == 0
    assert overlap(np.array([3, 1]), np.array([1, 3])) == 0.5
    assert np.isnan(overlap(np.array([0, 0]), np.array([1, 3])))


def test_stability_of_given_steps() -> None:
    # Ranks 0 and 1 take turns; over two micro-steps they are even.
    turns = np.array([[[3, 1]], [[1, 3]], [[3, 1]], [[1, 3]]])
    found = stability(turns, np.array([0, 2, 4]), 2)
    assert (found.step_max_over_mean, found.micro_step_max_over_mean) == (1.0, 1.5)
    assert (found.busiest_rank_changes, found.overlap_micro_steps) == (0.5, 0.5)
    assert (found.overlap_steps, found.overlap_halves) == (1.0, 0.5)
    # Loads change between steps; layers without load do not count.
    drift = np.array([[[3, 1], [0, 0]]] * 2 + [[[1, 1], [0, 0]]] * 2)
    found = stability(drift, np.array([0, 2, 4]), 2)
    assert (found.step_max_over_mean, found.micro_step_max_over_mean, found.overlap_micro_steps) == (1.25, 1.25, 1.0)
    assert (found.overlap_steps, found.busiest_rank_changes) == (0.75, 0.0)
    quiet = np.concatenate([turns, turns * 0], axis=1)
    assert stability(quiet, np.array([0, 2, 4]), 2).busiest_rank_changes == 0.5
    # Of three micro-steps the first is one half, the others the second.
    odd = stability(np.array([[[4, 0]], [[0, 4]], [[0, 4]]]), np.array([0, 3]), 2)
    assert odd.overlap_halves == 0.0
    assert odd.busiest_rank_changes == pytest.approx(1 / 3)
    lone = stability(turns[:1], np.array([0, 1]), 2)
    assert (lone.overlap_micro_steps, lone.overlap_steps, lone.overlap_halves) == (None, None, None)
    # The busiest rank is that of its own step.
    late = np.array([[[3, 1]], [[3, 1]], [[1, 3]], [[1, 3]]])
    assert stability(late, np.array([0, 2, 4]), 2).busiest_rank_changes == 0
    assert stability(late, np.array([0, 4]), 2).busiest_rank_changes == 0.5


def by_name(compared: PlacementComparison) -> dict[str, PlacementStrategy]:
    return {strategy.name: strategy for strategy in compared.strategies}


def test_placements_of_given_counts() -> None:
    # Experts 0 and 1 of rank 0 are hot in both steps: other homes balance all micro-steps.
    hot = by_name(compare_placements(np.array([[[4, 4, 0, 0]]] * 4), np.array([0, 2, 4]), 2))
    assert hot["static"].expert_time_lost == pytest.approx(0.5)
    assert (hot["homes_from_past"].expert_time_lost, hot["homes_from_past"].recovered_fraction) == (0.0, 1.0)
    assert hot["homes_from_step"].max_over_mean_mean == 1.0
    # What was hot is not any more: homes by the past put 0 and 2 together.
    drift = by_name(compare_placements(np.array([[[4, 4, 3, 3]], [[4, 0, 4, 0]]]), np.array([0, 1, 2]), 2))
    assert drift["homes_from_past"].expert_time_lost == pytest.approx(0.5)
    assert drift["homes_from_step"].expert_time_lost == drift["static"].expert_time_lost == 0.0
    assert drift["static"].recovered_fraction is None
    # One step: its first half is the past of the second. Within the second, 0 and 1 take turns with 2 and 3.
    turns = np.array([[[8, 8, 0, 0]], [[8, 8, 0, 0]], [[8, 8, 0, 0]], [[0, 0, 8, 8]]])
    compared = compare_placements(turns, np.array([0, 4]), 2)
    assert (compared.history, compared.instances) == ("half", 2)
    static = by_name(compared)["static"]
    assert (static.expert_time_lost, static.expert_time_lost_whole_step) == pytest.approx((0.5, 0.0))
    assert by_name(compared)["homes_from_past"].recovered_fraction == 1.0
    lone = compare_placements(turns[:1], np.array([0, 1]), 2)
    assert (lone.history, lone.best("past")) == (None, None)


def test_figures_of_placement_strategies() -> None:
    counts = np.array([[[100 + i, 100 - i]] for i in range(101)])
    found = by_name(compare_placements(counts, np.array([0, 50, 101]), 2))
    static = found["static"]
    assert static.max_over_mean_p99 == pytest.approx(1.995)
    assert (static.max_over_mean_mean, static.expert_time_lost_whole_step) == pytest.approx((1.75, 1 - 1 / 1.75))
    for name, source in (("replicas_from_past", counts[:50]), ("replicas_from_step", counts[50:])):
        assert found[name].expert_time_lost == lost_part(placed_loads(counts[50:], source.sum(axis=0), 2, 2))
    # `expert_time_lost_whole_step` sums each step, not all of them together.
    turns = np.array([[[4, 0]], [[4, 0]], [[0, 4]]])
    assert compare_placements(turns, np.array([0, 1, 2, 3]), 2).strategies[0].expert_time_lost_whole_step == 0.5
    first, second = (
        replace(static, expert_time_lost=lost, expert_time_lost_whole_step=0.3 - lost) for lost in (0.2, 0.1)
    )
    assert PlacementComparison((first, second), "step", 1).best("nothing") == second


def planned(name: str, counts: np.ndarray, cluster: ClusterSpec) -> tuple[StepPlan, Workload]:
    """The plan of a balancer, with all tokens of a micro-step on rank 0."""
    sequences = SequenceCounts(counts.astype(np.uint16), counts[:, 0].sum(axis=1), np.zeros(counts.shape[:2], np.int32))
    schedule = Schedule(np.arange(6, dtype=np.int32), np.zeros(6, np.int32), np.zeros(6, np.int32), cluster.ranks)
    policy, homes = POLICIES[name], Placement.contiguous(3, 8, cluster.ranks)
    plan = policy.plan(make_view(policy, sequences, schedule, homes, cluster, token_budget=10**6))
    return plan, Workload.from_sequences(sequences, schedule)


@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), ranks=st.sampled_from([1, 2, 4, 8]), slots=st.integers(0, 2))
def test_placed_loads_equal_the_eplb_policys_plan(seed: int, ranks: int, slots: int) -> None:
    counts = random_counts(seed)
    loads = placed_loads(counts, counts.sum(axis=0), ranks, slots)
    assert loads.sum(axis=-1) == pytest.approx(counts.sum(axis=-1))
    cluster = load_cluster("h100x8", ranks=ranks, slots_per_rank=slots, ranks_per_node=ranks)
    plan, workload = planned("eplb_oracle", counts, cluster)
    # The policy deals out whole tokens, each expert's within one of even.
    assert np.abs(plan.rank_loads(workload) - loads).max() <= counts.shape[-1]


def plain_hot(counts: np.ndarray, starts: list[int]) -> tuple[float, list[int], float | None]:
    """Hot experts per instance, lengths of runs, and persistence."""
    runs: list[int] = []
    hot, stays, could = 0, 0, 0
    instances = sum(bool(counts[m, layer].any()) for m, layer in np.ndindex(counts.shape[:2]))
    for first, last in pairwise([*starts, len(counts)]):
        for layer, expert in np.ndindex(counts.shape[1:]):
            is_hot = [counts[m, layer, expert] > 2 * counts[m, layer].mean() for m in range(first, last)]
            hot += sum(is_hot)
            runs += [len(list(run)) for value, run in groupby(is_hot) if value]
            could += sum(is_hot[:-1])
            stays += sum(before and after for before, after in pairwise(is_hot))
    return hot / instances, runs, stays / could if could else None


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), micro_steps=st.integers(1, 12), cut=st.integers(0, 12))
def test_hot_experts_equal_those_of_a_plain_loop(seed: int, micro_steps: int, cut: int) -> None:
    counts = random_counts(seed, micro_steps)
    if not counts.any():
        return
    starts = sorted({0, min(cut, micro_steps - 1)})
    found = hot_experts(counts, np.array([*starts, micro_steps]))
    per_instance, runs, persistence = plain_hot(counts, starts)
    assert found.per_instance == pytest.approx(per_instance)
    assert found.persistence == (pytest.approx(persistence) if persistence is not None else None)
    low = 0
    for longest, count in ((run.up_to, run.count) for run in found.runs):
        assert count == sum(low < run <= (longest or 10**9) for run in runs)
        low = longest or low
    assert found.mean_run == pytest.approx(np.mean(runs) if runs else 0)
    assert max((expert.longest_run for expert in found.hottest), default=0) <= max(runs, default=0)


def test_an_expert_is_hot_above_twice_the_mean() -> None:
    assert hot_mask(np.array([4, 0, 0, 4])).tolist() == [False] * 4
    assert hot_mask(np.array([5, 0, 0, 3])).tolist() == [True, False, False, False]
    assert not hot_mask(np.zeros(4, int)).any()
    found = hot_experts(np.array([[[5, 0, 0, 3]], [[9, 1, 0, 0]], [[0, 0, 0, 1]]]), np.array([0, 2, 3]))
    assert (found.token_part, found.overlap_steps, found.overlap_halves) == pytest.approx((15 / 19, 0.0, 1.0))
    first = found.hottest[0]
    assert (first.layer, first.expert, first.longest_run) == (0, 0, 2)
    assert first.hot_part == pytest.approx(2 / 3)


def test_hot_experts_of_several_layers() -> None:
    counts = np.array([[[5, 0, 0, 3], [90, 80, 20, 10]], [[9, 1, 0, 0], [0, 0, 0, 0]]])
    found = hot_experts(counts, np.array([0, 2]))
    assert [(each.layer, each.expert) for each in found.hottest[:2]] == [(0, 0), (1, 0)]
    assert [each.over_mean for each in found.hottest[:2]] == pytest.approx([14 * 4 / 18, 1.8])
    many = np.ones((2, 2, 8), int)
    many[:, 1, 5], many[:, 0, 3] = 9, 7
    assert [(each.layer, each.expert) for each in hot_experts(many, np.array([0, 2])).hottest[:2]] == [(1, 5), (0, 3)]
    assert len(hot_experts(many, np.array([0, 2])).hottest) == 10
    # Three instances have a load, and two hot experts among twelve.
    assert (found.per_instance, found.chance) == pytest.approx((2 / 3, 2 / 12))
    # By layer: one of three experts in either half, and the only one.
    steps = np.array([[[9, 9, 1, 1, 1, 1, 1], [9, 1, 1, 1, 1, 1, 1]], [[9, 1, 9, 1, 1, 1, 1], [9, 1, 1, 1, 1, 1, 1]]])
    assert hot_experts(steps, np.array([0, 1, 2])).overlap_steps == pytest.approx((1 / 3 + 1) / 2)
    assert hot_experts(steps, np.array([0, 2])).overlap_halves == pytest.approx((1 / 3 + 1) / 2)
    named = figures(analyze(trace_counts_of(counts, layer_indices=np.array([3, 7])), ranks=2))
    assert [each["layer"] for each in named["hot_experts"]["hottest"][:2]] == [3, 7]


def test_skew_and_overlap_of_given_domains() -> None:
    counts = np.array([[[6, 2, 0, 0]], [[2, 2, 2, 2]], [[0, 0, 0, 0]]])
    first, second = domain_skew(counts, ("maths", "code", "none"), 2)
    assert (first.token_part, first.busier_half_share, first.hottest_over_mean, first.max_over_mean) == (0.5, 1, 3, 2)
    assert (second.busier_half_share, second.hottest_over_mean, second.max_over_mean) == (0.5, 1, 1)
    assert domain_overlap(counts) == pytest.approx(np.array([[1, 0.5, 0], [0.5, 1, 0], [0, 0, 0]]))
    # Layers without known routes do not count.
    counts = np.array([[[2, 2, 0], [0, 0, 0]], [[2, 2, 0], [4, 0, 0]]])
    first, second = domain_skew(counts, ("maths", "code"), 1)
    assert (first.token_part, second.token_part) == pytest.approx((4 / 12, 8 / 12))
    # Of three experts one is the busier half.
    assert (first.busier_half_share, second.busier_half_share) == (0.5, 0.75)
    assert domain_overlap(counts).tolist() == [[1, 1], [1, 1]]


def test_node_balance_and_lost_shares_of_given_counts() -> None:
    counts = np.array([[np.arange(1, 9), [3] + [2] * 6 + [1]], [np.full(8, 2)] * 2, [np.full(8, 2), [9] + [1] * 7]])
    analysis = analyze(trace_counts_of(counts), ranks=8, ranks_per_node=4)
    # Mean ranks wait 8 - 4.5 in layer 0, and 1 and 7 in layer 1.
    assert analysis.lost_share_L.tolist() == pytest.approx([3.5 / 11.5, 8 / 11.5])
    nodes = [(26, 18), (9, 8), (8, 8), (8, 8), (8, 8), (12, 8)]
    assert analysis.nodes
    assert analysis.nodes.max_over_mean.mean == pytest.approx(np.mean([most / mean for most, mean in nodes]))
    assert [layer.instances for layer in analysis.layers] == [3, 3]
    assert analysis.layers[1].lost == pytest.approx(1 - (2 + 2 + 2) / (3 + 2 + 9))


def test_expert_seconds_equal_the_simulators() -> None:
    counts = random_counts(1)
    cluster = load_cluster("h100x8", ranks=4, slots_per_rank=0, ranks_per_node=2)
    model = load_model("qwen3-30b-a3b")
    costs = OperationCosts.of(cluster, model, moe_layers=3)
    plan, workload = planned("static", counts, cluster)
    work = rank_work(plan.replicas, plan.home, workload.estimated_MLRE, plan.ranks_per_node, costs)
    assert costs.copy_seconds(counts).reshape(6, 3, 4, 2).sum(axis=-1) == pytest.approx(work.experts_MLR)


def test_permuted_ids_are_means_over_permutations() -> None:
    counts = random_counts(11, experts=16) * 50
    # Hot experts lie side by side.
    counts[:, :, :4] *= 8
    found = analyze(trace_counts_of(counts), ranks=4)
    lost = []
    for seed in range(PERMUTATIONS):
        loads = (
            permute_experts(counts, random_orders(counts.shape[1], 16, seed))
            .reshape(*counts.shape[:2], 4, 4)
            .sum(axis=-1)
        )
        lost.append(1 - loads.mean(axis=-1).sum() / loads.max(axis=-1).sum())
    assert found.permuted.permutations == PERMUTATIONS >= 3
    assert len(set(lost)) > 1
    assert found.permuted.expert_time_lost == pytest.approx(np.mean(lost))
    assert found.permuted.expert_time_lost < 0.9 * found.total.lost
    assert f"({np.mean(lost):.0%} with permuted expert ids)" in answer(found)
    keys = {"permutations", "expert_time_lost", "step_s", "lost_s", "lost_part"}
    assert figures(found)["ids_permuted"].keys() == keys
    assert (found.permuted.step_s, found.permuted.lost_s, found.permuted.lost_part) == (None, None, None)
