"""Whole steps through all four levels: what every plan keeps, whatever the sizes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from helpers import planner_reference as reference
from helpers.planner_steps import Step, steady_step, steps
from trimtab import RoutingTrace
from trimtab.planner import pack_by_length


@settings(max_examples=80)
@given(steps())
def test_every_group_gets_a_valid_plan_for_its_sequences(step: Step) -> None:
    planned = step.plan()
    schedule, placement, plans = planned.schedule, planned.placement, planned.plans
    assert len(plans) == step.groups
    cluster = step.cluster
    for group, (plan, workload) in enumerate(zip(plans, step.workloads(schedule), strict=True)):
        plan.check(workload)
        mine = schedule.rank // cluster.ranks == group
        assert np.array_equal(plan.micro_step, schedule.micro_step[mine])
        assert np.array_equal(plan.rank, schedule.rank[mine] % cluster.ranks)
        assert np.array_equal(plan.home, placement.home)
        assert plan.mini_batch_of_micro_step.tolist() == schedule.mini_batch_of_micro_step.tolist()
        sizes = plan.num_ranks, plan.ranks_per_node, plan.slots_per_rank
        assert sizes == (cluster.ranks, cluster.ranks_per_node, cluster.slots_per_rank)


@settings(max_examples=60)
@given(steps())
def test_every_token_is_computed_once_and_no_rank_is_busier_than_without_replicas(step: Step) -> None:
    planned = step.plan()
    schedule, plans = planned.schedule, planned.plans
    for plan, workload in zip(plans, step.workloads(schedule), strict=True):
        ways = reference.rows_by_way(plan, workload)
        assert min(ways.values()) >= 0
        sent_MLR = np.zeros(workload.unknown_MLR.shape, np.int64)
        for (m, layer, source, _), rows in ways.items():
            sent_MLR[m, layer, source] += rows
        assert np.array_equal(sent_MLR, workload.token_counts_MLRE.sum(axis=3) + workload.unknown_MLR)
        loads_MLR = reference.rank_loads(plan, workload)
        assert np.array_equal(loads_MLR, plan.rank_loads(workload))
        assert np.all(loads_MLR.max(axis=2) <= workload.home_loads(plan.home).max(axis=2))


@settings(max_examples=60)
@given(steps())
def test_slots_smallest_shares_and_numbers_of_homes_are_kept(step: Step) -> None:
    planned = step.plan()
    placement, plans = planned.placement, planned.plans
    ranks = step.cluster.ranks
    for plan in plans:
        instance_P = np.repeat(np.arange(len(plan.replica_starts) - 1), np.diff(plan.replica_starts))
        slots_used = np.bincount(instance_P * ranks + plan.replica_ranks, minlength=1)
        assert slots_used.max() <= step.cluster.slots_per_rank
        for first, end in pairwise(plan.quota_starts):
            assert plan.quota_tokens[first:end].sum() >= step.settings.smallest_share
            assert len(set(plan.quota_sources[first:end].tolist())) == end - first
    assert placement.home.dtype == np.int16
    for home_E in placement.home:
        assert np.bincount(home_E, minlength=ranks).tolist() == [len(home_E) // ranks] * ranks


@settings(max_examples=60)
@given(steps())
def test_budgets_mini_batches_and_the_number_of_micro_steps_are_those_of_packing(step: Step) -> None:
    schedule = step.plan().schedule
    lengths = step.trace.sequence_lengths
    num_ranks = step.cluster.ranks * step.groups
    packed = pack_by_length(lengths, num_ranks=num_ranks, token_budget=step.token_budget, mini_batch=step.mini_batch)
    assert np.array_equal(schedule.mini_batch_of_micro_step, packed.mini_batch_of_micro_step)
    assert np.array_equal(schedule.mini_batch_of_micro_step[schedule.micro_step], step.mini_batch)
    assert reference.by_place(schedule, lengths).max() <= step.token_budget
    assert schedule.num_ranks == num_ranks


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
    planned = step.plan()
    schedule, plans = planned.schedule, planned.plans
    for plan, workload in zip(plans, step.workloads(schedule), strict=True):
        plan.check(workload)
        if step.cluster.ranks == 1 or step.cluster.slots_per_rank == 0:
            assert plan.num_replicas == 0


def test_sequences_without_tokens_and_empty_mini_batches_have_their_place() -> None:
    step = steady_step(0, sequences=6)
    no_rows = np.zeros((0, 2, 2), np.uint8)
    ids = [step.trace.sequence(s) if s % 2 else no_rows for s in range(6)]
    trace = RoutingTrace.from_sequences(ids, num_experts=8)
    step = replace(step, trace=trace, mini_batch=np.array([3, 0, 3, 0, 0, 0]))
    planned = step.plan()
    schedule, plan = planned.schedule, planned.plan
    plan.check(step.workloads(schedule)[0])
    assert sorted(set(schedule.mini_batch_of_micro_step.tolist())) == [0, 1, 2, 3]
    assert np.array_equal(schedule.mini_batch_of_micro_step[schedule.micro_step], step.mini_batch)
