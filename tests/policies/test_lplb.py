"""LPLB: its graphs, its linear program, and as a policy."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import Step, check_future_is_unseen, check_policy, random_step, random_steps
from trimtab.planner.plan.workload import max_over_mean
from trimtab.policies.rivals.lplb import Lplb, _Flow, _split_alike, links

Topology = Literal["cube", "torus"]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.sampled_from([1, 2, 3, 4, 8, 16]), st.integers(0, 5), st.sampled_from(["cube", "torus"]))
def test_each_direction_links_every_rank_once_within_its_group(
    nodes: int, per_node: int, slots: int, topology: Topology
) -> None:
    ranks = nodes * per_node
    group_size, source_RK = links(ranks, per_node, slots, topology=topology)
    assert ranks % group_size == 0
    assert source_RK.shape == (ranks, slots)
    for column in source_RK.T:
        assert sorted(column) == list(range(ranks))
        assert np.array_equal(column // group_size, np.arange(ranks) // group_size)
        assert ranks == 1 or group_size == 1 or not np.any(column == np.arange(ranks))


def test_links_equal_the_graphs_of_the_source() -> None:
    _, cube_RK = links(8, 8, 2, topology="cube")
    assert cube_RK.T.tolist() == [[3, 0, 1, 2, 7, 4, 5, 6], [6, 7, 4, 5, 0, 1, 2, 3]]
    group_size, ring_RK = links(16, 8, 1, topology="cube")
    assert group_size == 8
    assert ring_RK[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15, 8]
    group_size, torus_RK = links(32, 8, 2, topology="torus")
    assert group_size == 32
    assert torus_RK[[0, 7, 31]].tolist() == [[8, 1], [15, 0], [7, 24]]


@settings(max_examples=40, deadline=None)
@given(random_steps(), st.sampled_from(["cube", "torus"]))
def test_plans_are_valid_and_keep_to_the_terms(step: Step, topology: Topology) -> None:
    plans = check_policy(Lplb(topology), step)
    for plan in plans.values():
        workload = step.known_workload()
        rounding = step.cluster.slots_per_rank
        assert np.all(plan.rank_loads(workload).max(axis=-1) <= workload.home_loads(plan.home).max(axis=-1) + rounding)


@settings(max_examples=15, deadline=None)
@given(random_steps())
def test_plans_do_not_depend_on_later_instances(step: Step) -> None:
    check_future_is_unseen(Lplb(), step, np.random.default_rng(0))


def test_tokens_reach_the_emptiest_rank_over_several_links() -> None:
    """A ring of three: rank 0 is hot, rank 2 empty, and only rank 1 is linked with both."""
    load_E, home_E = np.array([90, 60, 0]), np.array([0, 1, 2])
    replicas_P2 = np.array([[0, 1], [1, 2], [2, 0]])
    assert _Flow(3, 3).solve(load_E, home_E, replicas_P2).tolist() == [40, 50, 0]


def test_a_balanced_load_moves_no_tokens() -> None:
    replicas_P2 = np.array([[0, 1], [1, 0]])
    assert _Flow(2, 2).solve(np.array([50, 50]), np.array([0, 1]), replicas_P2).tolist() == [0, 0]


def test_groups_are_balanced_independently() -> None:
    load_E, home_E = np.array([100, 0, 1000, 0]), np.arange(4)
    replicas_P2 = np.array([[0, 1], [1, 0], [2, 3], [3, 2]])
    assert _Flow(4, 2).solve(load_E, home_E, replicas_P2).tolist() == [50, 0, 500, 0]


def test_every_source_sends_the_same_fraction() -> None:
    quotas_PR = _split_alike(np.array([[40, 0], [20, 0], [0, 5]]), np.array([0, 1]), np.array([30, 2]))
    assert quotas_PR.tolist() == [[20, 10, 0], [0, 0, 2]]


@pytest.mark.parametrize("equal_terms", [False, True])
def test_history_chooses_the_hottest_experts(equal_terms: bool) -> None:
    step = random_step(np.random.default_rng(4), ranks=8, experts=64, past_steps=1, sequences=256, max_length=500)
    policy = Lplb()
    plan = policy.plan(step.view(policy, equal_terms=equal_terms))
    heat_LE = step.past_counts_PLE.sum(axis=0)
    for layer in range(plan.num_layers):
        for p in plan.replicas_of(0, layer):
            expert = plan.replica_experts[p]
            neighbours = plan.home[layer] == plan.home[layer, expert]
            assert np.sum(heat_LE[layer, neighbours] > heat_LE[layer, expert]) < 2
    workload = step.workload()
    assert max_over_mean(plan.rank_loads(workload)).mean() < max_over_mean(workload.home_loads(plan.home)).mean()


def test_own_recipe_balances_homes_by_history() -> None:
    step = random_step(np.random.default_rng(4), ranks=8, experts=64, past_steps=1)
    policy = Lplb()
    plan = policy.plan(step.view(policy, equal_terms=False))
    heat_E = step.past_counts_PLE[0, 0]
    before, after = (np.bincount(home[0], weights=heat_E) for home in (step.placement.home, plan.home))
    assert after.max() < before.max()
    assert np.all(np.bincount(plan.home[0]) == 8)
