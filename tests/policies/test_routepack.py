"""RoutePack: schedules that cost no more, within their budgets, and as a policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.planner_reference import by_place
from helpers.policies import check_packing, random_step
from trimtab import Placement
from trimtab.planner import Schedule, Workload
from trimtab.policies import View
from trimtab.policies.rivals.routepack import RoutePack

QUICK = RoutePack(evaluations=2000, population=3, temperatures=4)
# Without attention, few micro-steps are best, so that the budget limits nearly every move.
FULL = replace(QUICK, attention_per_token=0.0, attention_per_pair=0.0)


def cost(policy: RoutePack, view: View, schedule: Schedule, placement: Placement) -> float:
    """What RoutePack lowers: rows of the busiest rank in every layer, and attention of the busiest rank."""
    known = Workload.known(Workload.from_sequences(view.sequences, schedule).token_counts_MLRE)
    home_loads = known.home_loads(placement.home)
    attention_MR = by_place(schedule, policy.attention(view))
    return float(home_loads.max(axis=2).sum() + attention_MR.max(axis=1).sum())


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 40), st.booleans(), st.sampled_from([QUICK, FULL]))
def test_a_schedule_never_costs_more_and_stays_within_the_budget(
    seed: int, ranks: int, sequences: int, known: bool, policy: RoutePack
) -> None:
    """Recounted: the same mini-batches and number of micro-steps, within the budget; unknown rows do not count."""
    rng = np.random.default_rng(seed)
    step = random_step(rng, ranks=ranks, experts=2 * ranks, sequences=sequences, max_length=300, contiguous=True)
    if not known:
        unknown_SL = rng.integers(0, 2, step.sequences.unknown_SL.shape, np.int32)
        step = replace(step, sequences=replace(step.sequences, unknown_SL=unknown_SL))
    view, plan = check_packing(policy, step, rng.integers(0, 2, sequences), token_budget=600)
    before, after = (cost(policy, view, schedule, plan.placement) for schedule in (view.schedule, plan.schedule))
    assert after <= before * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_packing_comes_near_the_bound_of_the_homes(seed: int) -> None:
    """Sequences of two kinds that shared their micro-steps badly: mixed, they come near the bound of the homes."""
    rng = np.random.default_rng(seed)
    step = random_step(rng, ranks=4, experts=16, layers=2, micro_steps=4, sequences=64, contiguous=True)
    popularity_2LE = np.exp(rng.normal(0, 1.0, (2, 2, 16)))
    popularity_2LE /= popularity_2LE.sum(axis=-1, keepdims=True)
    counts_SLE = rng.multinomial(4000, popularity_2LE[np.arange(64) // 32]).astype(np.int32)
    sequences = replace(step.sequences, counts_SLE=counts_SLE, lengths=np.full(64, 1000, np.int64))
    schedule = replace(step.schedule, micro_step=(np.arange(64) // 16).astype(np.int32), rank=np.arange(64) % 4)
    step = replace(step, sequences=sequences, schedule=schedule)
    policy = RoutePack(evaluations=50_000)
    plan = policy.plan(replace(step.view(policy, equal_terms=False), token_budget=4000))
    workload = step.workload(plan)
    bound = workload.home_loads(plan.home).sum(axis=0).max(axis=-1).sum()
    unpacked = step.workload().home_loads(plan.home).max(axis=-1).sum()
    packed = workload.home_loads(plan.home).max(axis=-1).sum()
    assert bound <= packed <= bound + 0.1 * (unpacked - bound)
    assert by_place(plan.schedule, sequences.lengths).max() <= 4000


@pytest.mark.parametrize(("lengths", "ranks"), [([300] * 2, [0, 0]), ([200, 200, 100, 100], [0, 0, 1, 1])])
def test_a_move_or_a_swap_may_fill_a_place_up_to_the_budget(lengths: list[int], ranks: list[int]) -> None:
    step = random_step(np.random.default_rng(0), ranks=2, experts=4, micro_steps=1, sequences=len(ranks))
    step.sequences.lengths[:], step.schedule.rank[:] = lengths, ranks
    plan = QUICK.plan(replace(step.view(QUICK, equal_terms=False), token_budget=300))
    assert by_place(plan.schedule, step.sequences.lengths).tolist() == [[300, 300]]


def test_new_homes_reduce_the_load_of_a_single_micro_step() -> None:
    """One micro-step leaves nothing to pack: what is gained comes from the homes."""
    step = random_step(np.random.default_rng(2), ranks=4, experts=32, micro_steps=1, contiguous=True)
    plan = step.plan(replace(QUICK, smallest_gain=0.01))
    workload = step.workload()
    homes = (Placement.contiguous(2, 32, 4).home, plan.home)
    before, after = (workload.home_loads(home).max(axis=-1).sum() for home in homes)
    assert after < before
