"""Waterfill: shared experts are rows of the ranks that have least to do, among those that their token goes to."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.comparison_cases import MODEL, some_case
from helpers.simulated_steps import Case, cases, free_costs
from trimtab import ClusterSpec, Placement, Schedule, StepPlan, Workload
from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts
from trimtab.policies import POLICIES, Traits
from trimtab.policies.shared_rows import fill_shared_rows
from trimtab.simulator.comparison import simulate_policy
from trimtab.simulator.step import StepSettings

LITTLE = 1 + 1e-9


def shared_seconds(rows: int, costs: OperationCosts) -> float:
    if not rows:
        return 0.0
    return costs.copy_s + -(-rows // costs.tile_rows) * costs.tile_rows * costs.shared_token_s


def busiest(seconds_R: Array, rows_R: Array, costs: OperationCosts) -> float:
    return max(s + shared_seconds(n, costs) for s, n in zip(seconds_R.tolist(), rows_R.tolist(), strict=True))


def random_costs(rng: np.random.Generator) -> OperationCosts:
    return free_costs(
        copy_s=float(rng.choice([0.0, 0.5, 3.0])),
        shared_token_s=float(rng.choice([0.1, 1.0])),
        tile_rows=int(rng.choice([1, 2, 5])),
    )


def least_of_all(seconds_R: Array, tokens_R: Array, rows_RR: Array, costs: OperationCosts) -> float:
    """The least seconds of the busiest rank over all assignments of tokens to ranks."""
    ranks = len(seconds_R)
    sums = {(0,) * ranks}
    for source, tokens in enumerate(tokens_R.tolist()):
        most = [tokens if r == source else int(rows_RR[source, r]) for r in range(ranks)]
        parts = [x for x in itertools.product(*(range(min(m, tokens) + 1) for m in most)) if sum(x) == tokens]
        sums = {tuple(a + b for a, b in zip(one, x, strict=True)) for one in sums for x in parts}
    return min(busiest(seconds_R, np.array(rows), costs) for rows in sums)


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_no_assignment_has_a_less_busy_rank(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    costs, tokens_R = random_costs(rng), rng.integers(0, 5, ranks)
    seconds_R = rng.choice([0.0, 1.0, 2.5, 4.0, 8.0], ranks)
    rows_RR = rng.integers(0, 4, (ranks, ranks)) * rng.integers(0, 2, (ranks, ranks))
    filled_RR = fill_shared_rows(seconds_R, tokens_R, rows_RR, costs, 1)
    expected = least_of_all(seconds_R, tokens_R, rows_RR, costs)
    assert busiest(seconds_R, filled_RR.sum(axis=0), costs) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 8, 24]), st.sampled_from([0, 1, 40]))
def test_every_token_has_one_rank_that_it_may_have(seed: int, ranks: int, rows: int) -> None:
    """And no rank is busier than the busiest with every token on its own rank."""
    rng = np.random.default_rng(seed)
    costs, tokens_R, seconds_R = random_costs(rng), rng.integers(0, 60, ranks), rng.exponential(20, ranks)
    rows_RR = rng.integers(0, rows + 1, (ranks, ranks))
    filled_RR = fill_shared_rows(seconds_R, tokens_R, rows_RR, costs, ranks)
    assert filled_RR.sum(axis=1).tolist() == tokens_R.tolist()
    assert filled_RR.min(initial=0) >= 0
    assert np.all((filled_RR <= rows_RR) | np.eye(ranks, dtype=bool))
    assert busiest(seconds_R, filled_RR.sum(axis=0), costs) <= busiest(seconds_R, tokens_R, costs) * LITTLE


def test_tokens_leave_their_rank_only_for_a_less_busy_one_of_their_node_first() -> None:
    costs, tokens_R = free_costs(shared_token_s=1.0), np.full(4, 4)
    rows_RR = np.full((4, 4), 4)
    even_RR = fill_shared_rows(np.full(4, 3.0), tokens_R, rows_RR, costs, 2)
    assert even_RR.tolist() == np.diag(tokens_R).tolist()
    # Rank 1 has 8 s more than the others: the level is 3 + 6, so its tokens go to all others, first to rank 0.
    uneven_RR = fill_shared_rows(np.array([3.0, 11.0, 3.0, 3.0]), tokens_R, rows_RR, costs, 2)
    assert uneven_RR[1].tolist() == [4, 0, 0, 0]
    assert uneven_RR[[0, 2, 3]].tolist() == np.diag(tokens_R)[[0, 2, 3]].tolist()


def two_layers(costs: OperationCosts, *, moves_shared_rows: bool = True) -> Case:
    """Two ranks of one node with four tokens each. In layer 1 three of four rows are for rank 0, in layer 0 half."""
    counts_LRE = [[[2, 2], [2, 2]], [[3, 1], [3, 1]]]
    schedule = Schedule(np.zeros(2, np.int32), np.arange(2, dtype=np.int32), np.zeros(1, np.int32), 2)
    workload, cluster = Workload.known(np.array([counts_LRE], np.int32)), ClusterSpec(2, 2, 0)
    nothing = [np.empty((0, 2), np.int64)] * 2
    plan = StepPlan.from_instances(
        schedule, Placement.contiguous(2, 2, 2), nothing, nothing, mixed_ML=workload.mixed_ML, cluster=cluster
    )
    traits = Traits(known_at="nothing", transfers_start="never", copies="none", moves_shared_rows=moves_shared_rows)
    return Case(plan, workload, np.array([4, 4]), costs, cluster, traits, StepSettings())


# A token's dense parts take 0.25 s, half of them its shared experts; a row half a second, and as long on the way.
COSTS = free_costs(token_s=0.25, shared_token_s=0.125, row_s=0.5, near_row_s=0.5)


@pytest.mark.parametrize("forwards", [False, True])
def test_a_step_by_hand(forwards: bool) -> None:
    """Dense parts take half a second in a layer. In layer 0 each rank has 2 s and its own 4 shared rows, 0.5 s.

    In layer 1 rank 0 has 3 s and rank 1 has 1 s. Of rank 0's tokens one goes to rank 1, and its shared row with it:
    3.375 s and 1.625 s. Layer 0 sends two rows each way, 1 s; layer 1 three of rank 1's, 1.5 s, against which two of
    rank 0's take no longer.
    """
    costs = COSTS._replace(forwards=forwards)
    step = two_layers(costs).run()
    forward_s = (0.5 + 1 + 2.5 + 1) + (0.5 + 1.5 + 3.375 + 1.5)
    backward_s = (1 + 1 + 5 + 1) + (1 + 1.5 + 6.75 + 1.5)
    assert step.step_time_s == pytest.approx(2 * forward_s + backward_s)
    # Four forwards' worth: two, and a backward twice as long.
    assert step.parts_s["attention"] == pytest.approx(4 * (0.5 + 0.5))
    assert step.parts_s["experts"] == pytest.approx(4 * (2.5 + 2.5))
    assert step.parts_s["imbalance"] == pytest.approx(4 * 0.875)
    # Where shared experts are dense parts: 1 s, 2 s and 3 s.
    usual = two_layers(costs, moves_shared_rows=False).run()
    forward_s, backward_s = (1 + 1 + 2 + 1) + (1 + 1.5 + 3 + 1.5), (2 + 1 + 4 + 1) + (2 + 1.5 + 6 + 1.5)
    assert usual.step_time_s == pytest.approx(2 * forward_s + backward_s)
    assert usual.step_time_s > step.step_time_s


def test_shared_rows_have_the_fixed_time_and_the_tiles_of_a_copy() -> None:
    # Tiles of 3 rows: 4 rows take two of 0.375 s, so do rank 1's 5 and one of rank 0's 3.
    step = two_layers(COSTS._replace(copy_s=1.0, tile_rows=3)).run()
    experts_MLR = step.work.experts_MLR
    # A routed copy has a second as well.
    assert experts_MLR[0].tolist() == [[2 + 1 + 1.75, 2 + 1 + 1.75], [3 + 1 + 1.375, 1 + 1 + 1.75]]


def test_a_moved_row_is_sent_by_itself_only_if_rows_are_sent() -> None:
    """Layers in which each of rank 0's four tokens has a row on both ranks, and rank 1's one token on rank 0.

    Rank 0 has 5 rows, 2.5 s, and rank 1 has 4, 2 s. With three of rank 0's shared rows they take 2.625 s and 2.5 s.
    """
    counts_LRE = [[[4, 4], [1, 0]]] * 2
    case = two_layers(COSTS)
    case = replace(case, workload=Workload.known(np.array([counts_LRE], np.int32)), lengths=np.array([4, 1]))
    for forwards, sent in ((True, 4), (False, 4 + 3)):
        work = case.but(forwards=forwards).run().work
        assert work.experts_MLR[0].tolist() == [[2.625, 2.5]] * 2
        assert work.near_MLR[0].tolist() == [[0.5 * sent] * 2] * 2
        assert work.loads_MLR[0].tolist() == [[5, 4]] * 2


@settings(max_examples=100)
@given(cases())
def test_no_rank_is_busier_than_with_shared_rows_on_their_own_rank(case: Case) -> None:
    case = case.but(ideal=False, moves_shared_rows=False)
    before_MLR = case.run().work.experts_MLR + case.run().work.moved_MLR
    work = case.but(moves_shared_rows=True).run().work
    tokens_MR = np.zeros(before_MLR[:, 0].shape, np.int64)
    np.add.at(tokens_MR, (case.plan.micro_step, case.plan.rank), case.lengths)
    own_MLR = before_MLR + np.vectorize(lambda rows: shared_seconds(rows, case.costs))(tokens_MR)[:, None]
    assert np.all((work.experts_MLR + work.moved_MLR).max(axis=2) <= own_MLR.max(axis=2) * LITTLE)


@settings(max_examples=100)
@given(cases())
def test_without_shared_experts_nothing_changes(case: Case) -> None:
    plain, moving = (case.free("shared_token_s").but(moves_shared_rows=moves).run() for moves in (False, True))
    assert plain.parts_s == moving.parts_s


def test_it_is_scheduled_with_less_on_the_busiest_rank() -> None:
    """The plan is that of `scheduled`, and so is the step of a model without shared experts."""
    assert POLICIES["waterfill"].traits.copies == "none"
    for shared_width in (0, 32):
        case = some_case(model=replace(MODEL, shared_width=shared_width), measured=2)
        scheduled, waterfill = (simulate_policy(case, name) for name in ("scheduled", "waterfill"))
        assert waterfill.plan.hash == scheduled.plan.hash
        assert waterfill.memory == scheduled.memory
        assert (waterfill.step_times_s == scheduled.step_times_s) == (not shared_width)
        assert np.array_equal(waterfill.simulated.work.loads_MLR, scheduled.simulated.work.loads_MLR)


@pytest.mark.parametrize("forwards", [False, True])
def test_with_much_to_compute_a_step_is_faster_than_that_of_scheduled(forwards: bool) -> None:
    """Compute so slow that the fixed time of one more copy, and links, hardly matter."""
    cluster = ClusterSpec(4, 2, 1, expert_flops=1e7, dense_flops=1e7, tile_rows=1, dispatch_forwards=forwards)
    case = some_case(model=replace(MODEL, shared_width=32), cluster=cluster, token_budget=40)
    scheduled, waterfill = (simulate_policy(case, name).simulated for name in ("scheduled", "waterfill"))
    assert waterfill.step_time_s < scheduled.step_time_s
