"""Whole steps through all four levels: what every plan keeps, whatever the sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from helpers import planner_reference as reference
from helpers.planner_steps import Step, free_replicas, skewed_trace, steady_step, steps, with_operations
from trimtab import ClusterSpec, Placement, RoutingTrace
from trimtab.array_type import Array
from trimtab.planner import Planner, PlanSettings, SequenceCounts, pack_by_length, plan_sequences


@settings(max_examples=80, deadline=None)
@given(steps())
def test_every_group_gets_a_valid_plan_for_its_sequences(step: Step) -> None:
    schedule, placement, plans = step.plan()[:3]
    assert len(plans) == step.groups
    for group, (plan, workload) in enumerate(zip(plans, step.workloads(schedule), strict=True)):
        plan.check(workload)
        mine = schedule.rank // step.cluster.ranks == group
        assert np.array_equal(plan.micro_step, schedule.micro_step[mine])
        assert np.array_equal(plan.rank, schedule.rank[mine] % step.cluster.ranks)
        assert np.array_equal(plan.home, placement.home)
        assert plan.mini_batch_of_micro_step.tolist() == schedule.mini_batch_of_micro_step.tolist()
        sizes = (plan.num_ranks, plan.ranks_per_node, plan.slots_per_rank)
        assert sizes == (step.cluster.ranks, step.cluster.ranks_per_node, step.cluster.slots_per_rank)


@settings(max_examples=60, deadline=None)
@given(steps())
def test_every_token_is_computed_once_and_no_rank_is_busier_than_without_replicas(step: Step) -> None:
    schedule, _, plans = step.plan()[:3]
    for plan, workload in zip(plans, step.workloads(schedule), strict=True):
        ways = reference.rows_by_way(plan, workload)
        assert min(ways.values()) >= 0
        loads_MLR, sent_MLR = np.zeros((2, *workload.token_counts_MLRE.shape[:3]), np.int64)
        for (m, layer, source, rank), rows in ways.items():
            sent_MLR[m, layer, source] += rows
            loads_MLR[m, layer, rank] += rows
        assert np.array_equal(sent_MLR, workload.token_counts_MLRE.sum(axis=3) + workload.unknown_MLR)
        assert np.array_equal(loads_MLR, plan.rank_loads(workload))
        assert np.all(loads_MLR.max(axis=2) <= workload.home_loads(plan.home).max(axis=2))


@settings(max_examples=60, deadline=None)
@given(steps())
def test_slots_and_smallest_shares_are_kept(step: Step) -> None:
    for plan in step.plan().plans:
        instance = np.repeat(np.arange(len(plan.replica_starts) - 1), np.diff(plan.replica_starts))
        slots_used = np.zeros((len(plan.replica_starts) - 1, plan.num_ranks), np.int64)
        np.add.at(slots_used, (instance, plan.replica_ranks), 1)
        assert slots_used.max() <= step.cluster.slots_per_rank
        for first, end in zip(plan.quota_starts, plan.quota_starts[1:], strict=False):
            assert plan.quota_tokens[first:end].sum() >= step.settings.smallest_share
            assert len(set(plan.quota_sources[first:end].tolist())) == end - first


@settings(max_examples=60, deadline=None)
@given(steps())
def test_every_rank_is_home_to_its_share_of_experts(step: Step) -> None:
    _, placement, _ = step.plan()[:3]
    assert placement.home.dtype == np.int16
    for home_E in placement.home:
        experts = len(home_E) // step.cluster.ranks
        assert np.bincount(home_E, minlength=step.cluster.ranks).tolist() == [experts] * step.cluster.ranks


@settings(max_examples=60, deadline=None)
@given(steps())
def test_budgets_mini_batches_and_the_number_of_micro_steps_are_those_of_packing(step: Step) -> None:
    schedule, _, _ = step.plan()[:3]
    lengths = step.trace.sequence_lengths
    packed = pack_by_length(
        lengths,
        num_ranks=step.cluster.ranks * step.groups,
        token_budget=step.token_budget,
        mini_batch=step.mini_batch,
    )
    assert np.array_equal(schedule.mini_batch_of_micro_step, packed.mini_batch_of_micro_step)
    assert np.array_equal(schedule.mini_batch_of_micro_step[schedule.micro_step], step.mini_batch)
    assert reference.by_place(schedule, lengths).max() <= step.token_budget
    assert schedule.num_ranks == step.cluster.ranks * step.groups


@pytest.mark.parametrize(
    "sizes",
    [
        {"ranks": 1, "per_node": 1},
        {"ranks": 8, "per_node": 4, "experts": 8},
        {"ranks": 3, "per_node": 3, "experts": 9},
        {"ranks": 5, "per_node": 1, "experts": 5, "top_k": 1},
        {"slots": 0},
        {"sequences": 1},
        {"sequences": 1, "max_length": 1},
        {"top_k": 1, "groups": 3},
        {"ranks": 7, "per_node": 7, "experts": 14, "slots": 20},
        {"experts": 300, "ranks": 4},
    ],
    ids=str,
)
def test_odd_sizes_are_planned(sizes: dict[str, Any]) -> None:
    step = steady_step(0, **sizes)
    # Some sequence is exactly as long as the budget.
    step = replace(step, token_budget=int(step.trace.sequence_lengths.max()))
    schedule, _, plans = step.plan()[:3]
    for plan, workload in zip(plans, step.workloads(schedule), strict=True):
        plan.check(workload)
        if step.cluster.ranks == 1 or step.cluster.slots_per_rank == 0:
            assert plan.num_replicas == 0


def test_a_step_without_any_known_route_has_no_replicas_and_moves_nothing() -> None:
    step = steady_step(0)
    step.trace.expert_ids[:] = step.trace.no_route
    schedule, placement, (plan,) = step.plan()[:3]
    assert plan.mixed_ML[schedule.micro_step].all()
    assert plan.num_replicas == 0
    assert np.array_equal(placement.home, step.placement.home)


def test_mixed_instances_are_those_with_unknown_routes() -> None:
    step = steady_step(0)
    step.trace.expert_ids[step.trace.sequence_starts[5], 1] = step.trace.no_route
    schedule, _, (plan,) = step.plan()[:3]
    assert np.argwhere(plan.mixed_ML).tolist() == [[schedule.micro_step[5], 1]]


def test_sequences_without_tokens_and_empty_mini_batches_have_their_place() -> None:
    step = steady_step(0, sequences=6)
    no_rows = np.zeros((0, 2, 2), np.uint8)
    ids = [step.trace.sequence(s) if s % 2 else no_rows for s in range(6)]
    trace = RoutingTrace.from_sequences(ids, num_experts=8)
    step = replace(step, trace=trace, mini_batch=np.array([3, 0, 3, 0, 0, 0]))
    schedule, _, (plan,) = step.plan()[:3]
    plan.check(step.workloads(schedule)[0])
    assert sorted(set(schedule.mini_batch_of_micro_step.tolist())) == [0, 1, 2, 3]
    assert np.array_equal(schedule.mini_batch_of_micro_step[schedule.micro_step], step.mini_batch)


def test_homes_move_towards_the_load_and_then_stay() -> None:
    """Experts 0 and 1 are always hot, both at rank 0: they are parted once, and the next step moves nothing."""
    ids_TLK = np.tile(np.array([[[0, 1]]]), (2000, 1, 1))
    trace = RoutingTrace.from_sequences([ids_TLK] * 8, num_experts=4)
    stateful = Planner(ClusterSpec(2, 2, 0), Placement.contiguous(1, 4, 2))
    stateful.add(trace)
    stateful.finish(token_budget=2000)
    home_E = stateful.placement.home[0].tolist()
    assert home_E[0] != home_E[1]
    stateful.add(trace)
    stateful.finish(token_budget=2000)
    assert stateful.placement.home[0].tolist() == home_E


def test_homes_stay_where_moving_costs_more_than_it_saves() -> None:
    step = replace(steady_step(0, slots=0), settings=PlanSettings())
    costs = free_replicas(step.cluster)
    homes = [
        step.plan(costs=with_operations(costs, near_state_s=seconds, far_state_s=seconds)).placement.home
        for seconds in (0.0, 1e9)
    ]
    assert not np.array_equal(homes[0], step.placement.home)
    assert np.array_equal(homes[1], step.placement.home)


def test_all_levels_together_leave_little_imbalance() -> None:
    """Skewed sequences on eight ranks: homes take off a part of the imbalance, one slot a rank nearly all of it."""
    trace = skewed_trace(np.random.default_rng(0), sequences=64, layers=3, experts=32, top_k=4, max_length=120)
    sequences = SequenceCounts.from_trace(trace)
    placement = Placement.contiguous(3, 32, 8)
    by_slots = [
        plan_sequences(
            sequences, placement, cluster, token_budget=256, settings=PlanSettings(1.0, 8),
            costs=with_operations(free_replicas(cluster), near_state_s=0.0, far_state_s=0.0),
        )
        for cluster in (ClusterSpec(8, 4, 0), ClusterSpec(8, 4, 1))
    ]  # fmt: skip
    homes, (plan,), schedule = by_slots[0].placement, by_slots[1].plans, by_slots[1].schedule
    assert np.array_equal(by_slots[0].schedule.rank, schedule.rank)
    workload = reference.workload(sequences, schedule)

    def busiest_over_even(loads_MLR: Array) -> float:
        return float((loads_MLR.max(axis=2).sum() * 8) / loads_MLR.sum())

    before = busiest_over_even(workload.home_loads(placement.home))
    after = busiest_over_even(plan.rank_loads(workload))
    assert before > 1.5
    assert busiest_over_even(workload.home_loads(homes.home)) < 1 + 0.9 * (before - 1)
    assert after < 1.03


def test_replicas_that_are_not_worth_their_bytes_are_left_out() -> None:
    """Few tokens and dear transfers: homes alone; with free transfers replicas come, and the busiest rank has less."""
    trace = skewed_trace(np.random.default_rng(0), sequences=64, layers=3, experts=32, top_k=4, max_length=120)
    sequences, cluster = SequenceCounts.from_trace(trace), ClusterSpec(8, 4, 2)
    placement, chosen = Placement.contiguous(3, 32, 8), PlanSettings(1.0, 8)
    free = free_replicas(cluster)
    dear = with_operations(free, near_weights_s=1.0, far_weights_s=1.0, host_weights_s=1.0)
    counts = []
    for costs in (free, dear):
        (plan,) = plan_sequences(sequences, placement, cluster, token_budget=256, settings=chosen, costs=costs).plans
        counts.append(plan.num_replicas)
    assert counts[0] > 10
    assert counts[1] == 0
