"""open-instruct's packing: homes fixed, whole sequences, never worse than the start, and bounded proposals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import Step, check_policy, random_step, random_steps
from trimtab import Schedule
from trimtab.array_type import Array
from trimtab.planner import Workload
from trimtab.planner.schedule.schedule import pack_by_length
from trimtab.policies import View
from trimtab.policies.rivals.openinstruct import OpenInstruct
from trimtab.policies.rivals.sequence_swaps import Packing, greedy_places, load_places, measures, swap_sequences
from trimtab.policies.static import Static


def packed_step(seed: int, *, ranks: int, budget: int, sequences: int, batches: int = 2) -> tuple[Step, Array]:
    """A step packed by length, and the mini-batch of every sequence."""
    step = random_step(
        np.random.default_rng(seed), ranks=ranks, experts=2 * ranks, sequences=sequences, max_length=budget, layers=2
    )
    mini_batch_S = np.arange(sequences) % batches
    schedule = pack_by_length(step.sequences.lengths, num_ranks=ranks, token_budget=budget, mini_batch=mini_batch_S)
    return replace(step, schedule=schedule), mini_batch_S


def view_of(step: Step, policy: OpenInstruct, budget: int) -> View:
    return replace(step.view(policy, equal_terms=False), token_budget=budget)


def plain_measures(view: View, schedule: Schedule, steps: Array) -> list[float]:
    """The six measures of some micro-steps, recounted with whole arrays."""
    workload = Workload.known(Workload.from_sequences(view.sequences, schedule).token_counts_MLRE)
    rows_MLR = workload.home_loads(view.placement.home)[steps]
    tokens_MR, squares_MR = np.zeros((2, schedule.num_micro_steps, schedule.num_ranks), np.int64)
    np.add.at(tokens_MR, (schedule.micro_step, schedule.rank), view.sequences.lengths)
    np.add.at(squares_MR, (schedule.micro_step, schedule.rank), view.sequences.lengths**2)
    total_M, peak_ML = rows_MLR.sum(axis=(1, 2)), rows_MLR.max(axis=2)
    ratio_M = np.where(total_M > 0, peak_ML.sum(axis=1) * schedule.num_ranks / np.maximum(total_M, 1), 1.0)
    return [
        float(peak_ML.sum()),
        float(tokens_MR[steps].max(axis=1).sum()),
        float(squares_MR[steps].max(axis=1).sum()),
        float(ratio_M.mean()),
        float(ratio_M.max()),
        float(peak_ML.max()),
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 40), st.sampled_from([0, 50, 1024]))
def test_nothing_becomes_worse_and_sequences_stay_whole(seed: int, ranks: int, sequences: int, proposals: int) -> None:
    """Recounted by mini-batch: homes fixed, no copies, the same micro-steps, within the budget, nothing worse."""
    budget = 600
    step, mini_batch_S = packed_step(seed, ranks=ranks, budget=budget, sequences=sequences)
    policy = OpenInstruct(proposals=proposals)
    view = view_of(step, policy, budget)
    plan = policy.plan(view)
    plan.check(step.workload(plan))
    assert np.array_equal(plan.home, step.placement.home)
    assert plan.num_replicas == 0
    assert np.array_equal(plan.mini_batch_of_micro_step, step.schedule.mini_batch_of_micro_step)
    assert np.array_equal(plan.mini_batch_of_micro_step[plan.micro_step], mini_batch_S)
    tokens_MR = np.zeros((plan.num_micro_steps, plan.num_ranks), np.int64)
    np.add.at(tokens_MR, (plan.micro_step, plan.rank), step.sequences.lengths)
    assert tokens_MR.max() <= budget
    for batch in np.unique(mini_batch_S):
        steps = np.flatnonzero(plan.mini_batch_of_micro_step == batch)
        before, after = (plain_measures(view, schedule, steps) for schedule in (step.schedule, plan.schedule))
        for i in (0, 3, 4, 5):
            assert after[i] <= before[i] * (1 + 1e-12), "rows are less even"
        assert sum(after[i] / max(before[i], 1) for i in range(3)) <= sum(before[i] > 0 for i in range(3)) * (1 + 1e-12)


def problem_of(seed: int, *, sequences: int = 48, ranks: int = 4, micro_steps: int = 4) -> tuple[Packing, Array]:
    """Sequences of two kinds, sorted by kind into micro-steps, so that swaps help; equal lengths."""
    rng = np.random.default_rng(seed)
    kind_S = np.arange(sequences) * 2 // sequences
    popularity_2LR = rng.dirichlet(np.full(ranks, 0.5), (2, 2))
    rows_SLR = rng.multinomial(4000, popularity_2LR[kind_S]).astype(np.int32)
    places_S2 = np.stack([np.arange(sequences) * micro_steps // sequences, np.arange(sequences) % ranks], axis=1)
    return Packing(rows_SLR, np.full(sequences, 500), micro_steps, ranks, 500 * sequences), places_S2


@pytest.mark.parametrize("seed", range(4))
def test_measures_equal_those_recounted(seed: int) -> None:
    problem, places_S2 = problem_of(seed)
    loads = load_places(problem, places_S2)
    rows_MLR = np.zeros((4, 2, 4), np.int64)
    np.add.at(rows_MLR, places_S2[:, 0], problem.rows_SLR)
    assert np.array_equal(loads.rows_MLR, rows_MLR)
    peak_ML = rows_MLR.max(axis=2)
    ratio_M = peak_ML.sum(axis=1) * 4 / rows_MLR.sum(axis=(1, 2))
    expected = [peak_ML.sum(), 4 * 1500, 4 * 3 * 500**2, ratio_M.mean(), ratio_M.max(), peak_ML.max()]
    np.testing.assert_allclose(measures(loads), expected)


@pytest.mark.parametrize("seed", range(4))
def test_swaps_reduce_the_rows_of_the_busiest_rank(seed: int) -> None:
    """At least half of what mixing the kinds evenly could gain, and no less with more proposals."""
    problem, start_S2 = problem_of(seed)
    start = measures(load_places(problem, start_S2))
    bound = problem.rows_SLR.sum(axis=0).max(axis=1).sum()
    found = []
    for proposals in (0, 64, 1024):
        best_S2 = start_S2.copy()
        swap_sequences(problem, start_S2, (start, start), (proposals, 256), best_S2, np.random.default_rng(0))
        assert sorted(map(tuple, best_S2.tolist())) == sorted(map(tuple, start_S2.tolist())), "only swaps"
        found.append(measures(load_places(problem, best_S2))[0])
    assert found[0] == start[0]
    assert bound <= found[2] <= found[1] < found[0]
    assert found[2] - bound < 0.5 * (start[0] - bound)


def test_the_greedy_candidate_mixes_kinds_and_fits() -> None:
    problem, start_S2 = problem_of(0)
    places_S2 = greedy_places(problem)
    assert measures(load_places(problem, places_S2))[0] < measures(load_places(problem, start_S2))[0]
    tight = problem._replace(token_budget=1500)
    tokens_MR = load_places(tight, greedy_places(tight)).tokens_MR
    assert tokens_MR.max() <= 1500
    assert greedy_places(problem._replace(token_budget=1000)).min() == -1, "twelve of 48 sequences fit nowhere"


@settings(max_examples=40, deadline=None)
@given(random_steps())
def test_on_equal_terms_the_plan_is_that_of_static(step: Step) -> None:
    plans = check_policy(OpenInstruct(proposals=64), step)
    assert plans["equal"].hash == Static().plan(step.view(Static(), equal_terms=True)).hash
