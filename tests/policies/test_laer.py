"""LAER-MoE: layouts compared with those of its own planner, and as a policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import Step, check_policy, golden, instances, poisoned, random_step, random_steps
from trimtab.array_type import Array
from trimtab.policies.rivals.expert_copies import count_copies, spread_copies
from trimtab.policies.rivals.laer import Laer, layout


def equal_split(load_E: Array, copies_RE: Array) -> Array:
    return (copies_RE * (load_E / copies_RE.sum(axis=0))).sum(axis=1)


@pytest.mark.parametrize("case", golden("laer"))
def test_layouts_have_the_rank_loads_of_the_source(case: dict[str, Any]) -> None:
    """The same copies of every expert and the same load of every rank, two copies on a rank included; nodes of eight.

    Which of two experts with equal loads per copy is where depends on the source's unstable sort.
    """
    counts_RE = np.array(case["counts"])
    load_E = counts_RE.sum(axis=0)
    copies_RE = layout(counts_RE, case["capacity_per_rank"], 8)
    golden_RE = np.zeros_like(counts_RE)
    for rank, experts in enumerate(case["experts_of_rank"]):
        np.add.at(golden_RE[rank], experts, 1)
    assert np.array_equal(copies_RE.sum(axis=0), golden_RE.sum(axis=0))
    assert np.array_equal(copies_RE.sum(axis=1), golden_RE.sum(axis=1))
    assert copies_RE.max() == golden_RE.max()
    np.testing.assert_allclose(equal_split(load_E, copies_RE), equal_split(load_E, golden_RE), rtol=1e-12)


def busiest(counts_RE: Array, copies_RE: Array, per_node: int) -> float:
    """Every source's tokens go equally to the copies of its node, or to all where it has none."""
    load_R = np.zeros(len(counts_RE))
    for source, tokens_E in enumerate(counts_RE):
        node = np.arange(len(counts_RE)) // per_node == source // per_node
        for e, tokens in enumerate(tokens_E):
            near_R = copies_RE[:, e] * node
            to_R = near_R if near_R.any() else copies_RE[:, e]
            load_R += tokens * to_R / to_R.sum()
    return load_R.max()


@pytest.mark.parametrize("seed", range(40))
def test_the_layout_with_the_less_busy_rank_is_chosen(seed: int) -> None:
    """Of two: copies by load, and as many of each expert."""
    rng = np.random.default_rng(seed)
    ranks, per_node, experts = 8, 4, 8
    capacity = int(rng.choice([2, 3, 4]))
    counts_RE = rng.gamma(0.5, 100, (ranks, experts)) * rng.gamma(0.7, 1, experts)
    total, load_E, none_E = ranks * capacity, counts_RE.sum(axis=0), np.full(experts, -1)
    numbers = count_copies(load_E, total, ranks // per_node, total), np.full(experts, total // experts)
    found = [
        busiest(
            counts_RE,
            spread_copies(load_E, copies_E, none_E, np.full(ranks, capacity), per_node, distinct=False),
            per_node,
        )
        for copies_E in numbers
    ]
    chosen = busiest(counts_RE, layout(counts_RE, capacity, per_node), per_node)
    assert chosen == pytest.approx(min(found)), found


@settings(max_examples=60)
@given(random_steps(), st.integers(1, 5))
def test_plans_are_valid_and_keep_to_the_terms(step: Step, window: int) -> None:
    plans = check_policy(Laer(window), step)
    homes_per_rank = -(-plans["own"].home.shape[1] // step.cluster.ranks)
    assert plans["own"].slots_per_rank == homes_per_rank + step.cluster.slots_per_rank


@pytest.mark.parametrize("equal_terms", [False, True])
def test_a_layout_does_not_see_its_own_micro_step(equal_terms: bool) -> None:
    rng = np.random.default_rng(1)
    step = random_step(rng, ranks=8, experts=32, micro_steps=3, sequences=48, past_steps=1, least=8)
    plan = step.plan(Laer(), equal_terms=equal_terms)
    other_step = poisoned(step, np.random.default_rng(0), micro_step=0, layer=plan.num_layers - 1)
    other = other_step.plan(Laer(), equal_terms=equal_terms)
    places = [[[(e, r) for e, r, _ in replicas] for replicas in instances(one)] for one in (plan, other)]
    until = 2 * plan.num_layers
    assert places[0][:until] == places[1][:until]
    assert places[0][until:] != places[1][until:], "the third micro-step has seen the second"


def test_sources_use_copies_of_their_own_node() -> None:
    step = random_step(np.random.default_rng(2), ranks=8, experts=16, ranks_per_node=4, past_steps=1, least=8)
    plan = step.plan(Laer())
    for replicas in instances(plan):
        nodes: dict[int, set[int]] = {}
        for expert, rank, _ in replicas:
            nodes.setdefault(expert, set()).add(rank // 4)
        for expert, rank, tokens in replicas:
            for source in tokens:
                assert source // 4 == rank // 4 or source // 4 not in nodes[expert]
