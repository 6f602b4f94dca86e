"""LPLB: its graphs, its linear program, and as a policy."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import instances, random_step
from trimtab.planner.plan.workload import max_over_mean
from trimtab.policies.rivals.lplb import Lplb, links

Topology = Literal["cube", "torus"]


@settings(max_examples=100)
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


@pytest.mark.parametrize(
    ("counts", "per_node", "loads", "moved"),
    [
        ([90, 0, 60], 3, [50, 50, 50], 90),  # rank 1 is linked with rank 2 alone, which passes on what rank 0 has
        ([50, 50], 2, [50, 50], 0),
        ([100, 0, 1000, 0], 2, [50, 50, 500, 500], 550),  # groups are balanced by themselves
    ],
)
def test_tokens_flow_along_links_until_groups_are_even(
    counts: list[int], per_node: int, loads: list[int], moved: int
) -> None:
    """An expert on each rank, and a replica of it on the rank before."""
    step = random_step(
        np.random.default_rng(0), ranks=len(counts), experts=len(counts), ranks_per_node=per_node, slots=1, layers=1,
        micro_steps=1, sequences=1, contiguous=True,
    )  # fmt: skip
    step.sequences.counts_SLE[0, 0] = counts
    plan = step.plan(Lplb())
    assert plan.rank_loads(step.workload())[0, 0].tolist() == loads
    assert plan.quota_tokens.sum() == moved


def test_every_source_sends_the_same_part() -> None:
    step = random_step(np.random.default_rng(0), ranks=4, experts=8, sequences=32)
    plan, counts_MLRE = step.plan(Lplb()), step.workload().token_counts_MLRE
    assert plan.num_replicas > 0
    for instance, replicas in enumerate(instances(plan)):
        counts_RE = counts_MLRE[divmod(instance, plan.num_layers)]
        for expert, _, tokens in replicas:
            part = sum(tokens.values()) / max(counts_RE[:, expert].sum(), 1)
            assert all(abs(tokens.get(r, 0) - counts_RE[r, expert] * part) < 1 for r in range(4))


@pytest.mark.parametrize("equal_terms", [False, True])
def test_history_chooses_the_hottest_experts(equal_terms: bool) -> None:
    step = random_step(np.random.default_rng(4), ranks=8, experts=64, past_steps=1, sequences=256, max_length=500)
    plan = step.plan(Lplb(), equal_terms=equal_terms)
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
    plan = step.plan(Lplb())
    heat_E = step.past_counts_PLE[0, 0]
    before, after = (np.bincount(home[0], weights=heat_E) for home in (step.placement.home, plan.home))
    assert after.max() < before.max()
    assert np.all(np.bincount(plan.home[0]) == 8)
