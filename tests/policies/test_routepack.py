"""RoutePack: schedules that cost no more, within their budgets, and as a policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import Step, check_policy, random_step, random_steps
from trimtab import Placement
from trimtab.array_type import Array
from trimtab.planner import Schedule, SequenceCounts, Workload, pack_by_length
from trimtab.policies import View
from trimtab.policies.rivals.routepack import Annealing, Problem, RoutePack, anneal_schedule
from trimtab.policies.static import Static

QUICK = RoutePack(evaluations=2000, population=3, temperatures=4)


def packed_step(seed: int, *, ranks: int, experts: int, budget: int, sequences: int) -> tuple[Step, Array]:
    """Sequences of two mini-batches, packed by length, and the mini-batches `[S]`."""
    rng = np.random.default_rng(seed)
    step = random_step(rng, ranks=ranks, experts=experts, sequences=sequences, max_length=budget // 2, contiguous=True)
    mini_batch_S = rng.integers(0, 2, sequences)
    schedule = pack_by_length(step.sequences.lengths, num_ranks=ranks, token_budget=budget, mini_batch=mini_batch_S)
    return replace(step, schedule=schedule), mini_batch_S


def view_of(step: Step, policy: RoutePack, budget: int) -> View:
    return replace(step.view(policy, equal_terms=False), token_budget=budget)


def tokens(step: Step, micro_step: Array, rank: Array) -> Array:
    tokens_MR = np.zeros((step.schedule.num_micro_steps, step.schedule.num_ranks), np.int64)
    np.add.at(tokens_MR, (micro_step, rank), step.sequences.lengths)
    return tokens_MR


def cost(view: View, schedule: Schedule, placement: Placement) -> float:
    """What RoutePack lowers: rows of the busiest rank in every layer, and attention of the busiest rank."""
    known = Workload.known(Workload.from_sequences(view.sequences, schedule).token_counts_MLRE)
    home_loads = known.home_loads(placement.home)
    attention_MR = np.zeros((schedule.num_micro_steps, schedule.num_ranks))
    np.add.at(attention_MR, (schedule.micro_step, schedule.rank), QUICK.attention(view))
    return float(home_loads.max(axis=2).sum() + attention_MR.max(axis=1).sum())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 40), st.booleans())
def test_a_schedule_never_costs_more_and_stays_within_the_budget(
    seed: int, ranks: int, sequences: int, known: bool
) -> None:
    """Recounted: the same mini-batches and number of micro-steps, within the budget; unknown rows do not count."""
    budget = 600
    step, mini_batch_S = packed_step(seed, ranks=ranks, experts=2 * ranks, budget=budget, sequences=sequences)
    if not known:
        unknown_SL = np.random.default_rng(seed).integers(0, 2, step.sequences.unknown_SL.shape, np.int32)
        step = replace(step, sequences=replace(step.sequences, unknown_SL=unknown_SL))
    view = view_of(step, QUICK, budget)
    plan = QUICK.plan(view)
    plan.check(step.workload(plan))
    assert np.array_equal(plan.mini_batch_of_micro_step, step.schedule.mini_batch_of_micro_step)
    assert np.array_equal(plan.mini_batch_of_micro_step[plan.micro_step], mini_batch_S)
    assert tokens(step, plan.micro_step, plan.rank).max() <= budget
    before, after = (cost(view, schedule, plan.placement) for schedule in (step.schedule, plan.schedule))
    assert after <= before * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_packing_comes_near_the_bound_of_the_homes(seed: int) -> None:
    """Sequences of two kinds that shared their micro-steps badly: mixed, they come near the bound of the homes."""
    rng = np.random.default_rng(seed)
    step = random_step(rng, ranks=4, experts=16, layers=2, micro_steps=4, sequences=64, contiguous=True)
    popularity_2LE = np.exp(rng.normal(0, 1.0, (2, 2, 16)))
    kind_S = np.arange(64) // 32
    popularity_SLE = popularity_2LE[kind_S] / popularity_2LE[kind_S].sum(axis=-1, keepdims=True)
    sequences = replace(
        step.sequences,
        counts_SLE=rng.multinomial(4000, popularity_SLE).astype(np.int32),
        lengths=np.full(64, 1000, np.int64),
    )
    schedule = replace(step.schedule, micro_step=(np.arange(64) // 16).astype(np.int32), rank=np.arange(64) % 4)
    step = replace(step, sequences=sequences, schedule=schedule)
    policy = RoutePack(evaluations=50_000)
    plan = policy.plan(view_of(step, policy, 4000))
    workload = step.workload(plan)
    bound = workload.home_loads(plan.home).sum(axis=0).max(axis=-1).sum()
    unpacked = step.workload().home_loads(plan.home).max(axis=-1).sum()
    packed = workload.home_loads(plan.home).max(axis=-1).sum()
    assert bound <= packed <= bound + 0.1 * (unpacked - bound)
    assert tokens(step, plan.micro_step, plan.rank).max() <= 4000


def test_packing_balances_attention_without_expert_rows() -> None:
    """Without expert rows, long sequences that shared a rank are spread over ranks."""
    lengths_S = np.array([100, 100, 100, 100, 10, 10, 10, 10])
    rank_S = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    step_S, new_rank_S = anneal_schedule(
        Problem(np.zeros((8, 1, 2), np.int32), lengths_S**2.0, lengths_S, np.zeros(1, np.int64), 2, 1000),
        np.zeros(8, np.int64),
        rank_S,
        Annealing(5000, 2, 8),
        np.random.default_rng(0),
    )
    assert not step_S.any()
    assert np.bincount(new_rank_S, lengths_S).tolist() == [220, 220]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_rows_are_counted_at_the_homes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts_SLE = rng.integers(0, 9, (3, 2, 6)).astype(np.uint16)
    home_LE = rng.integers(0, 4, (2, 6)).astype(np.int16)
    sequences = SequenceCounts(counts_SLE, np.full(3, 100), np.zeros((3, 2), np.int32))
    rows_SLR = sequences.rows_by_place(home_LE, 4, np.arange(2))
    for s, layer, rank in np.ndindex(3, 2, 4):
        assert rows_SLR[s, layer, rank] == counts_SLE[s, layer, home_LE[layer] == rank].sum()


@settings(max_examples=40, deadline=None)
@given(random_steps())
def test_on_equal_terms_the_plan_is_that_of_static(step: Step) -> None:
    plans = check_policy(QUICK, step)
    assert plans["equal"].hash == Static().plan(step.view(Static(), equal_terms=True)).hash


def test_new_homes_reduce_the_load_of_a_single_micro_step() -> None:
    """One micro-step leaves nothing to pack: what is gained comes from the homes."""
    step = random_step(np.random.default_rng(2), ranks=4, experts=32, micro_steps=1, contiguous=True)
    plan = QUICK.plan(step.view(QUICK, equal_terms=False))
    workload = step.workload()
    homes = (Placement.contiguous(2, 32, 4).home, plan.home)
    before, after = (workload.home_loads(home).max(axis=-1).sum() for home in homes)
    assert after < before
