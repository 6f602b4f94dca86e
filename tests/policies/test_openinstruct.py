"""open-instruct's packing: homes fixed, whole sequences, never worse than the start, and bounded proposals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.planner_reference import by_place
from helpers.policies import check_packing, random_step
from trimtab import Schedule
from trimtab.array_type import Array
from trimtab.planner import Workload
from trimtab.policies import View
from trimtab.policies.rivals.openinstruct import OpenInstruct
from trimtab.policies.rivals.sequence_swaps import (
    Packing,
    _draw_least,
    load_places,
    measures,
    swap_sequences,
    work_of,
)


def plain_measures(view: View, schedule: Schedule, steps: Array) -> list[float]:
    """The six measures of some micro-steps, recounted with whole arrays."""
    workload = Workload.known(Workload.from_sequences(view.sequences, schedule).token_counts_MLRE)
    rows_MLR = workload.home_loads(view.placement.home)[steps]
    tokens_MR, squares_MR = (by_place(schedule, view.sequences.lengths**power) for power in (1, 2))
    total_M, peak_ML = rows_MLR.sum(axis=(1, 2)), rows_MLR.max(axis=2)
    ratio_M = np.where(total_M > 0, peak_ML.sum(axis=1) * schedule.num_ranks / np.maximum(total_M, 1), 1.0)
    tokens, squares = (sums_MR[steps].max(axis=1).sum() for sums_MR in (tokens_MR, squares_MR))
    return [float(x) for x in (peak_ML.sum(), tokens, squares, ratio_M.mean(), ratio_M.max(), peak_ML.max())]


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 40), st.sampled_from([0, 50, 1024]))
def test_nothing_becomes_worse_and_sequences_stay_whole(seed: int, ranks: int, sequences: int, proposals: int) -> None:
    """Recounted by mini-batch: homes fixed, no copies, the same micro-steps, within the budget, nothing worse."""
    rng = np.random.default_rng(seed)
    step = random_step(rng, ranks=ranks, experts=2 * ranks, sequences=sequences, max_length=600)
    mini_batch_S = np.arange(sequences) % 2
    view, plan = check_packing(OpenInstruct(proposals=proposals), step, mini_batch_S, token_budget=600)
    assert np.array_equal(plan.home, step.placement.home)
    assert plan.num_replicas == 0
    for batch in np.unique(mini_batch_S):
        steps = np.flatnonzero(plan.mini_batch_of_micro_step == batch)
        before, after = (plain_measures(view, schedule, steps) for schedule in (view.schedule, plan.schedule))
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
def test_swaps_reduce_the_rows_of_the_busiest_rank(seed: int) -> None:
    """At least half of what mixing the kinds evenly could gain, and no less with more proposals."""
    problem, start_S2 = problem_of(seed)
    loads = load_places(problem, start_S2)
    start = measures(loads)
    plain_MLR, plain_MR = np.zeros_like(loads.rows_MLR), np.zeros_like(loads.tokens_MR)
    np.add.at(plain_MLR, start_S2[:, 0], problem.rows_SLR)
    np.add.at(plain_MR, tuple(start_S2.T), problem.lengths_S)
    assert np.array_equal(loads.rows_MLR, plain_MLR)
    assert np.array_equal(loads.tokens_MR, plain_MR)
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


def test_a_micro_step_without_rows_is_even() -> None:
    problem, start_S2 = problem_of(0, micro_steps=1)
    alone, beside = (measures(load_places(problem._replace(num_micro_steps=m), start_S2)) for m in (1, 2))
    assert beside[3] == pytest.approx((alone[3] + 1) / 2)
    assert beside[4] == alone[4]


def test_greedy_places_are_taken_if_they_are_better() -> None:
    """Without swaps. The start has the short sequences on one rank and the long ones on the other."""
    problem, start_S2 = problem_of(0, ranks=2, micro_steps=1)
    problem = problem._replace(lengths_S=np.arange(48) * 20)
    start_S2[:, 1] = np.arange(48) // 24
    best_S2 = OpenInstruct(proposals=0)._search(problem, start_S2, np.random.default_rng(0))
    start, best = (measures(load_places(problem, places_S2)) for places_S2 in (start_S2, best_S2))
    assert work_of(best, start) < 3


def test_greedy_places_without_one_for_every_sequence_are_not_taken() -> None:
    """They even out rows, but leave no place with room for the last sequence, which fits beside the first."""
    rows_SR = np.array([[103, 0], [101, 0], [0, 102], [0, 100], [10, 0], [0, 0]], np.int32)
    problem = Packing(rows_SR[:, None], np.array([4, 5, 5, 5, 1, 2]), 2, 2, token_budget=6)
    start_S2 = np.array([[0, 0], [0, 1], [1, 0], [1, 1], [0, 1], [0, 0]])
    assert np.array_equal(OpenInstruct(proposals=0)._search(problem, start_S2, np.random.default_rng(0)), start_S2)


def test_swaps_of_equal_sequences_end_a_search() -> None:
    problem, start_S2 = problem_of(0)
    problem.rows_SLR[:] = problem.rows_SLR[0]
    start, drawn = measures(load_places(problem, start_S2)), []
    for proposals in (20, 1000):
        rng = np.random.default_rng(0)
        swap_sequences(problem, start_S2, (start, start), (proposals, 20), start_S2.copy(), rng)
        drawn.append(rng.random())
    assert drawn[0] == drawn[1], "swaps without success are not counted"


def test_one_of_the_least_allowed_values_is_drawn() -> None:
    rng = np.random.default_rng(0)
    for allowed_number in (0, 1, 3, 20):
        values, allowed = rng.normal(size=20), rng.permutation(20) < allowed_number
        least = [i for i in np.argsort(values).tolist() if allowed[i]][:4] or [-1]
        assert {int(_draw_least(values, allowed, 4, rng)) for _ in range(100)} == set(least)
