"""LAER-MoE: layouts compared with those of its own planner, and as a policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import (
    Step,
    check_future_is_unseen,
    check_policy,
    golden,
    instances,
    poisoned,
    random_step,
    random_steps,
)
from trimtab.array_type import Array
from trimtab.policies.rivals.laer import Laer, layout


def equal_split(load_E: Array, copies_RE: Array) -> Array:
    return (copies_RE * (load_E / copies_RE.sum(axis=0))).sum(axis=1)


@pytest.mark.parametrize("case", golden("laer"))
def test_layouts_are_no_worse_than_those_of_the_source(case: dict[str, Any]) -> None:
    """Golden loads count some tokens twice, so golden layouts are also counted anew: there 0.01% may be lost."""
    counts_RE = np.array(case["counts"])
    load_E = counts_RE.sum(axis=0)
    held_RE = layout(counts_RE, case["capacity_per_rank"], case["ranks"])
    assert held_RE.sum(axis=1).max() <= case["capacity_per_rank"]
    busiest = equal_split(load_E, held_RE).max()
    assert busiest <= max(case["rank_load"])
    golden_RE = np.zeros_like(counts_RE)
    for rank, experts in enumerate(case["experts_of_rank"]):
        np.add.at(golden_RE[rank], experts, 1)
    assert busiest <= equal_split(load_E, golden_RE).max() * 1.0001


@settings(max_examples=60, deadline=None)
@given(random_steps(), st.integers(1, 5))
def test_plans_are_valid_and_keep_to_the_terms(step: Step, window: int) -> None:
    plans = check_policy(Laer(window), step)
    assert (
        plans["own"].slots_per_rank
        == -(-plans["own"].home.shape[1] // step.cluster.ranks) + step.cluster.slots_per_rank
    )


@settings(max_examples=20, deadline=None)
@given(random_steps())
def test_plans_do_not_depend_on_later_instances(step: Step) -> None:
    check_future_is_unseen(Laer(), step, np.random.default_rng(0))


@pytest.mark.parametrize("equal_terms", [False, True])
def test_a_layout_does_not_see_its_own_micro_step(equal_terms: bool) -> None:
    step = random_step(
        np.random.default_rng(1), ranks=8, experts=32, micro_steps=3, sequences=48, past_steps=1, least=8
    )
    policy = Laer()
    plan = policy.plan(step.view(policy, equal_terms=equal_terms))
    other_step = poisoned(step, np.random.default_rng(0), micro_step=0, layer=plan.num_layers - 1)
    other = policy.plan(other_step.view(policy, equal_terms=equal_terms))
    places = [[[(e, r) for e, r, _ in replicas] for replicas in instances(one)] for one in (plan, other)]
    until = 2 * plan.num_layers
    assert places[0][:until] == places[1][:until]
    assert places[0][until:] != places[1][until:], "the third micro-step has seen the second"


def test_without_history_the_first_micro_step_has_no_replicas() -> None:
    step = random_step(np.random.default_rng(1), ranks=4, experts=16, micro_steps=2, sequences=16, past_steps=0)
    plan = Laer().plan(step.view(Laer(), equal_terms=False))
    assert len(plan.replicas_of(0, 0)) == 0
    assert len(plan.replicas_of(1, 0)) > 0


def test_sources_use_copies_of_their_own_node() -> None:
    step = random_step(np.random.default_rng(2), ranks=8, experts=16, ranks_per_node=4, past_steps=1, least=8)
    plan = Laer().plan(step.view(Laer(), equal_terms=False))
    for m, layer in np.ndindex(plan.num_micro_steps, plan.num_layers):
        replicas = instances(plan)[m * plan.num_layers + layer]
        nodes: dict[int, set[int]] = {}
        for expert, rank, _ in replicas:
            nodes.setdefault(expert, set()).add(rank // 4)
        for expert, rank, tokens in replicas:
            for source in tokens:
                assert source // 4 == rank // 4 or source // 4 not in nodes[expert]


def test_equal_replica_counts_are_chosen_if_better() -> None:
    """Two ranks, four slots, two experts: one copy of each everywhere beats three copies of one."""
    held_RE = layout(np.array([[50, 50], [50, 50]]), 2, 2)
    assert held_RE.all()
