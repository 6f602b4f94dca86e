"""FEPLB: moves equal to a plain reference, and as a policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import Step, check_policy, instances, random_loads, random_step, random_steps
from trimtab.array_type import Array
from trimtab.planner.replicas.whole_experts import InstanceLoad, choose_whole_experts
from trimtab.policies.rivals.feplb import Feplb


def moves(load: InstanceLoad, may_move_E: Array) -> list[list[int]]:
    moves_P2 = np.zeros((len(load.loads_R) * load.slots, 2), np.int64)
    # The kernel changes the arrays that it is given.
    count = choose_whole_experts(load._replace(loads_R=load.loads_R.copy()), may_move_E.copy(), moves_P2)
    listed: list[list[int]] = moves_P2[:count].tolist()
    return listed


def plain_moves(load: InstanceLoad, may_move_E: Array) -> list[list[int]]:
    """The same in plain Python."""
    loads, counts, ranks = load.loads_R.tolist(), load.counts_E.tolist(), len(load.loads_R)
    free = [load.slots] * ranks
    may_move = set(np.flatnonzero(may_move_E).tolist())
    moved = []
    for first in range(0, ranks, load.ranks_per_node):
        members = range(first, first + load.ranks_per_node)
        while True:
            giver = max(members, key=lambda r: (loads[r], -r))
            takers = [r for r in members if free[r]]
            taker = min(takers, key=lambda r: (loads[r], r), default=giver)
            experts = [e for e in may_move if load.home_E[e] == giver and loads[taker] + counts[e] < loads[giver]]
            if not experts:
                break
            expert = max(experts, key=lambda e: (counts[e], -e))
            may_move.remove(expert)
            loads[giver] -= counts[expert]
            loads[taker] += counts[expert]
            free[taker] -= 1
            moved.append([expert, taker])
    return moved


@settings(max_examples=200)
@given(random_loads([(1, 1), (4, 2), (6, 3), (8, 8)], within_node=True), st.sampled_from([1, 200]), st.integers(0, 99))
def test_moves_equal_those_of_a_plain_scheduler(load: InstanceLoad, smallest: int, seed: int) -> None:
    dynamic_E = np.random.default_rng(seed).random(len(load.counts_E)) < 0.6
    may_move_E = dynamic_E & (load.counts_E >= smallest)
    assert moves(load, may_move_E) == plain_moves(load, may_move_E)


@settings(max_examples=80)
@given(random_steps(), st.integers(0, 5))
def test_whole_dynamic_experts_move_and_static_ones_stay(step: Step, dynamic_experts: int) -> None:
    """With `check_policy`: they move inside the node and into the slots."""
    policy = Feplb(dynamic_experts=dynamic_experts)
    plans = check_policy(policy, step)
    assert plans["own"].slots_per_rank == dynamic_experts
    assert plans["equal"].slots_per_rank == step.cluster.slots_per_rank
    workload = step.known_workload()
    dynamic_LE = policy.dynamic(step.view(policy, equal_terms=False))
    before = workload.home_loads(step.placement.home).max(axis=-1)
    for plan in plans.values():
        assert np.all(plan.rank_loads(workload).max(axis=-1) <= before)
        for instance, replicas in enumerate(instances(plan)):
            m, layer = divmod(instance, plan.num_layers)
            for expert, _, tokens in replicas:
                assert dynamic_LE[layer, expert]
                assert sum(tokens.values()) == workload.token_counts_MLRE[m, layer, :, expert].sum()


def test_the_hottest_experts_of_the_past_are_dynamic() -> None:
    step = random_step(np.random.default_rng(0), ranks=2, experts=8, layers=1, past_steps=2, contiguous=True)
    policy = Feplb(dynamic_experts=2)
    no_past = replace(step, past_counts_PLE=step.past_counts_PLE[:0])
    assert np.flatnonzero(policy.dynamic(no_past.view(policy, equal_terms=False))[0]).tolist() == [0, 1, 4, 5]
    past = step.past_counts_PLE.sum(axis=0)[0]
    hottest = sorted(np.argsort(-past[:4])[:2].tolist() + (4 + np.argsort(-past[4:])[:2]).tolist())
    assert np.flatnonzero(policy.dynamic(step.view(policy, equal_terms=False))[0]).tolist() == hottest
