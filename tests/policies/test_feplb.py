"""FEPLB: moves equal to a plain reference, published figures, and as a policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import Step, check_future_is_unseen, check_policy, random_step, random_steps
from trimtab import ClusterSpec
from trimtab.array_type import Array
from trimtab.policies.rivals.feplb import Feplb, move_experts
from trimtab.policies.rivals.instance_load import InstanceLoad


def moves(
    counts_E: Array, home_E: Array, dynamic_E: Array, ranks: int, per_node: int, slots: int, smallest: int
) -> list[list[int]]:
    moves_P2 = np.zeros((ranks * slots, 2), np.int64)
    load = InstanceLoad.of(counts_E, home_E, ClusterSpec(ranks, per_node, slots), within_node=True)
    count = move_experts(load, dynamic_E & (counts_E >= smallest), moves_P2)
    listed: list[list[int]] = moves_P2[:count].tolist()
    return listed


def plain_moves(
    counts_E: Array, home_E: Array, dynamic_E: Array, ranks: int, per_node: int, slots: int, smallest: int
) -> list[list[int]]:
    """The same in plain Python."""
    loads = [int(counts_E[home_E == r].sum()) for r in range(ranks)]
    free = [slots] * ranks
    may_move = {e for e in range(len(counts_E)) if dynamic_E[e] and counts_E[e] >= smallest}
    moved = []
    for first in range(0, ranks, per_node):
        members = range(first, first + per_node)
        while True:
            giver = max(members, key=lambda r: (loads[r], -r))
            takers = [r for r in members if free[r]]
            taker = min(takers, key=lambda r: (loads[r], r), default=giver)
            experts = [e for e in may_move if home_E[e] == giver and loads[taker] + counts_E[e] < loads[giver]]
            if not experts:
                break
            expert = max(experts, key=lambda e: (counts_E[e], -e))
            may_move.remove(expert)
            loads[giver] -= int(counts_E[expert])
            loads[taker] += int(counts_E[expert])
            free[taker] -= 1
            moved.append([expert, taker])
    return moved


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(1, 1), (4, 2), (6, 3), (8, 8)]), st.integers(1, 6), st.integers(0, 4))
def test_moves_equal_those_of_a_plain_scheduler(seed: int, sizes: tuple[int, int], per_rank: int, slots: int) -> None:
    ranks, per_node = sizes
    rng = np.random.default_rng(seed)
    experts = ranks * per_rank
    counts_E = rng.integers(0, rng.choice([2, 100, 5000]), experts) * (rng.random(experts) < 0.8)
    home_E = rng.permutation(np.arange(experts) % ranks)
    dynamic_E = rng.random(experts) < 0.6
    case = (counts_E, home_E, dynamic_E, ranks, per_node, slots, int(rng.choice([1, 200])))
    assert moves(*case) == plain_moves(*case)


@settings(max_examples=80, deadline=None)
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
        for m, layer in np.ndindex(plan.num_micro_steps, plan.num_layers):
            for p in plan.replicas_of(m, layer):
                expert = plan.replica_experts[p]
                assert dynamic_LE[layer, expert]
                quotas = slice(plan.quota_starts[p], plan.quota_starts[p + 1])
                assert plan.quota_tokens[quotas].sum() == workload.token_counts_MLRE[m, layer, :, expert].sum()


def test_the_hottest_experts_of_the_past_are_dynamic() -> None:
    step = random_step(np.random.default_rng(0), ranks=2, experts=8, layers=1, past_steps=2, contiguous=True)
    policy = Feplb(dynamic_experts=2)
    no_past = replace(step, past_counts_PLE=step.past_counts_PLE[:0])
    assert np.flatnonzero(policy.dynamic(no_past.view(policy, equal_terms=False))[0]).tolist() == [0, 1, 4, 5]
    past = step.past_counts_PLE.sum(axis=0)[0]
    hottest = sorted(np.argsort(-past[:4])[:2].tolist() + (4 + np.argsort(-past[4:])[:2]).tolist())
    assert np.flatnonzero(policy.dynamic(step.view(policy, equal_terms=False))[0]).tolist() == hottest


def test_tokens_above_the_mean_fall_as_published() -> None:
    """At EP 8 with 128 experts, tokens of the busiest rank above the mean fall by 51-70% or more."""
    before, after = 0.0, 0.0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        popularity_E = np.exp(rng.normal(0, 0.7, 128))
        home_E = np.arange(128) // 16
        dynamic_E = np.zeros(128, bool)
        for r in range(8):
            dynamic_E[r * 16 + np.argsort(-popularity_E[r * 16 : r * 16 + 16])[:4]] = True
        drifted_E = popularity_E * np.exp(rng.normal(0, 0.2, 128))
        counts_E = rng.multinomial(8 * 8 * 4096, drifted_E / drifted_E.sum())
        loads = np.bincount(home_E, counts_E, 8)
        before += loads.max() - loads.mean()
        for expert, rank in moves(counts_E, home_E, dynamic_E, 8, 8, 4, 1):
            loads[home_E[expert]] -= counts_E[expert]
            loads[rank] += counts_E[expert]
        after += loads.max() - loads.mean()
    assert after <= 0.49 * before


@settings(max_examples=15, deadline=None)
@given(random_steps(), st.integers(0, 2**32))
def test_plans_do_not_depend_on_later_instances(step: Step, seed: int) -> None:
    check_future_is_unseen(Feplb(), step, np.random.default_rng(seed))
