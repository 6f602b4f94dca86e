"""EPLB: equal to outputs of its source, and as a policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from helpers.policies import Step, check_policy, golden, instances, poisoned, random_step, random_steps
from trimtab.planner.placement.packing import rebalance
from trimtab.policies.rivals.eplb import Eplb, EplbOracle
from trimtab.policies.rivals.expert_copies import count_copies, split_equally, spread_copies

GOLDEN = golden("eplb")


@pytest.mark.parametrize("case", GOLDEN)
def test_packing_equals_the_source_except_for_equal_loads(case: dict[str, Any]) -> None:
    load_E = np.array(case["load"])
    expert_of_slot, copies_E = rebalance(load_E, case["slots"], case["groups"], case["nodes"], case["ranks"])
    assert copies_E.tolist() == case["replica_count"]
    share_E = load_E / copies_E
    assert share_E[expert_of_slot].tolist() == share_E[case["physical_to_logical"]].tolist()
    load_R = share_E[expert_of_slot].reshape(case["ranks"], -1).sum(axis=1)
    assert load_R == pytest.approx(np.array(case["rank_load"]), abs=1e-3)


@settings(max_examples=60)
@given(random_steps())
def test_plans_are_valid_and_keep_to_the_terms(step: Step) -> None:
    for policy in (Eplb(), Eplb(window=1), EplbOracle()):
        plans = check_policy(policy, step)
        copies = np.bincount(plans["own"].home[0], minlength=step.cluster.ranks)
        assert copies.max() <= -(-len(plans["own"].home[0]) // step.cluster.ranks) + step.cluster.slots_per_rank


@pytest.mark.parametrize("equal_terms", [False, True])
def test_the_routing_of_the_step_changes_only_the_split(equal_terms: bool) -> None:
    step = random_step(np.random.default_rng(3), ranks=8, experts=32, past_steps=2, least=100)
    plan = step.plan(Eplb(), equal_terms=equal_terms)
    other = poisoned(step, np.random.default_rng(0)).plan(Eplb(), equal_terms=equal_terms)
    assert np.array_equal(plan.home, other.home)
    assert np.array_equal(plan.replica_experts, other.replica_experts)
    assert np.array_equal(plan.replica_ranks, other.replica_ranks)
    assert instances(plan) != instances(other)


@pytest.mark.parametrize(("interval", "last"), [(1, 5), (2, 5), (3, 4), (4, 5), (5, 1), (None, 1)])
def test_between_placements_loads_and_copies_are_those_of_the_last_one(interval: int | None, last: int) -> None:
    """After steps 1, 1 + interval, 1 + 2 * interval ...; here five steps are past."""
    step = random_step(np.random.default_rng(5), ranks=8, experts=32, past_steps=5, least=50)
    seen = replace(step, past_counts_PLE=step.past_counts_PLE[:last])
    plan, expected = step.plan(Eplb(interval=interval)), seen.plan(Eplb())
    assert plan.hash == expected.hash
    assert (plan.hash == step.plan(Eplb()).hash) == (last == 5)


def test_without_history_homes_stay_and_nothing_is_copied() -> None:
    step = random_step(np.random.default_rng(0), ranks=4, experts=16, past_steps=0)
    plan = step.plan(Eplb())
    assert plan.num_replicas == 0
    assert np.array_equal(plan.home, step.placement.home)


def test_homes_stay_on_ranks_with_a_copy_or_move_to_that_with_fewest_homes() -> None:
    step = random_step(np.random.default_rng(1), ranks=8, experts=64, past_steps=3, least=8)
    plan = step.plan(Eplb())
    for layer, old_E in enumerate(step.placement.home):
        copies = [{home} for home in plan.home[layer].tolist()]
        for expert, rank, _ in instances(plan)[layer]:
            copies[expert].add(rank)
        homes = [old if old in ranks else -1 for old, ranks in zip(old_E.tolist(), copies, strict=True)]
        assert -1 in homes
        for expert, ranks in enumerate(copies):
            if homes[expert] < 0:
                homes[expert] = min(ranks, key=lambda rank: (homes.count(rank), rank))
        assert plan.home[layer].tolist() == homes


def test_copies_go_to_the_highest_load_per_copy() -> None:
    assert count_copies(np.array([90.0, 50.0, 10.0, 0.0]), 7, 1, 4).tolist() == [3, 2, 1, 1]
    assert count_copies(np.array([90.0, 50.0, 10.0, 0.0]), 7, 1, 2).tolist() == [2, 2, 2, 1], "no more than two each"
    assert count_copies(np.array([90.0, 10.0]), 7, 2, 8).tolist() == [4, 2], "whole nodes only"
    assert count_copies(np.zeros(2), 4, 1, 4).tolist() == [1, 1], "nothing to share"


def test_copies_spread_over_nodes_then_to_the_emptiest_rank() -> None:
    load_E, copies_E = np.array([80.0, 30.0, 20.0, 10.0]), np.array([2, 1, 1, 1])
    copies_RE = spread_copies(load_E, copies_E, np.full(4, -1), np.array([2, 2, 1, 1]), 2, distinct=True)
    assert copies_RE.tolist() == [[1, 0, 0, 0], [0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 1, 0]]


def test_only_distinct_copies_are_left_out_where_every_rank_has_the_expert() -> None:
    load_E, copies_E, room_R = np.array([90.0, 10.0]), np.array([3, 1]), np.array([2, 2])
    for distinct, expected in ((True, [[1, 1], [1, 0]]), (False, [[2, 0], [1, 1]])):
        copies_RE = spread_copies(load_E, copies_E, np.full(2, -1), room_R, 2, distinct=distinct)
        assert copies_RE.tolist() == expected


def test_every_source_splits_equally_over_the_near_copies() -> None:
    counts_RE = np.array([[7], [7], [7], [8]])
    copies_RE = np.array([[1], [1], [1], [0]])
    replicas_P2, quotas_PR = split_equally(counts_RE, np.array([0]), copies_RE, 4)
    assert replicas_P2.tolist() == [[0, 1], [0, 2]]
    assert quotas_PR.tolist() == [[2, 3, 2, 3], [2, 2, 3, 2]]
    _, quotas_PR = split_equally(counts_RE, np.array([0]), copies_RE, 2)
    assert quotas_PR.tolist() == [[3, 4, 0, 0], [0, 0, 7, 8]]


def test_the_oracle_balances_the_whole_step_better_than_history() -> None:
    step = random_step(np.random.default_rng(2), ranks=8, experts=64, past_steps=1, micro_steps=4, sequences=256)
    plans = step.plan(EplbOracle()), step.plan(Eplb())
    oracle_L, history_L = (plan.rank_loads(step.workload()).sum(axis=0).max(axis=-1) for plan in plans)
    assert np.all(oracle_L < history_L)
