"""Unknown routes: rows are expected at homes in proportion to known ones, and known rows are planned around them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import planner_reference as reference
from helpers.random_plans import random_placement, random_schedule, random_trace
from trimtab import ClusterSpec, Placement, Schedule, StepPlan, Workload
from trimtab.planner import PlanSettings, plan_step
from trimtab.planner.plan.bounds import gap_to_bound, load_bound
from trimtab.planner.plan.prediction import cross_node_rows

SHARES = st.sampled_from([0.01, 0.1, 0.5, 0.9, 0.99, 1.0])


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Workload, Schedule, Placement]:
    """Steps with a share of unknown routes, homes anywhere."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    experts = ranks * draw(st.integers(1, 5))
    trace = random_trace(
        rng, num_sequences=draw(st.integers(1, 12)), max_length=draw(st.sampled_from([1, 20, 200])),
        num_layers=draw(st.integers(1, 3)), num_experts=experts, top_k=draw(st.integers(1, min(4, experts))),
        unknown=draw(SHARES),
    )  # fmt: skip
    schedule = random_schedule(rng, trace.num_sequences, num_ranks=ranks, num_micro_steps=draw(st.integers(1, 3)))
    placement = random_placement(rng, trace.num_layers, experts, ranks)
    return Workload.from_trace(trace, schedule), schedule, placement


@settings(max_examples=80, deadline=None)
@given(workloads())
def test_expected_loads_are_in_proportion_and_sum_to_the_unknown_rows(
    case: tuple[Workload, Schedule, Placement],
) -> None:
    workload, _, placement = case
    expected_MLR = workload.expected_loads(placement.home)
    assert expected_MLR.dtype == np.int64
    assert np.array_equal(expected_MLR.sum(axis=2), workload.unknown_MLR.sum(axis=2))
    experts_per_rank = workload.num_experts // workload.num_ranks
    for (m, layer, rank), rows in np.ndenumerate(expected_MLR):
        known_E = workload.token_counts_MLRE[:, layer].sum(axis=(0, 1), dtype=np.int64)
        weights_E = [int(known) + 1 for known in known_E]
        here = sum(weight for e, weight in enumerate(weights_E) if placement.home[layer, e] == rank)
        exact = Fraction(int(workload.unknown_MLR[m, layer].sum()) * here, sum(weights_E))
        assert rows >= 0
        assert abs(rows - exact) < experts_per_rank
    reference_MLR = np.zeros_like(expected_MLR)
    for (m, layer, expert), rows in np.ndenumerate(reference.expected_experts(workload)):
        reference_MLR[m, layer, placement.home[layer, expert]] += rows
    assert np.array_equal(expected_MLR, reference_MLR)


@settings(max_examples=80, deadline=None)
@given(workloads())
def test_estimates_keep_every_sum(case: tuple[Workload, Schedule, Placement]) -> None:
    workload, _, placement = case
    added_MLRE = workload.estimated_MLRE.astype(np.int64) - workload.token_counts_MLRE
    assert added_MLRE.min() >= 0
    assert np.array_equal(added_MLRE.sum(axis=3), workload.unknown_MLR)
    assert np.array_equal(workload.estimated_MLRE, reference.estimated(workload))
    assert np.array_equal(
        Workload.known(added_MLRE).home_loads(placement.home), workload.expected_loads(placement.home)
    )
    assert int(workload.estimated_MLRE.sum()) == workload.num_rows


def test_large_loads_do_not_overflow() -> None:
    """Two billion known rows of an expert over the step, and a hundred million unknown ones of an instance."""
    counts_MLRE = np.zeros((4, 1, 4, 4), np.int32)
    counts_MLRE[:, :, :, 0] = 125_000_000
    workload = Workload(counts_MLRE, np.full((4, 1, 4), 25_000_000, np.int32))
    loads_MLR = workload.expected_loads(np.arange(4))
    assert loads_MLR[0, 0].tolist() == [99_999_999, 0, 0, 1]
    assert workload.estimated_MLRE.sum(axis=3, dtype=np.int64).tolist() == [[[150_000_000] * 4]] * 4


@settings(max_examples=120, deadline=None)
@given(workloads(), st.integers(0, 3), st.integers(1, 64), st.sampled_from([1.0, 1.02, 1.2]))
def test_plans_are_valid_and_never_worse_than_the_homes(
    case: tuple[Workload, Schedule, Placement], slots: int, smallest_share: int, threshold: float
) -> None:
    workload, schedule, placement = case
    per_node = max(d for d in (1, 2, 4) if workload.num_ranks % d == 0)
    cluster = ClusterSpec(workload.num_ranks, per_node, slots)
    plan = plan_step(workload, schedule, placement, cluster, PlanSettings(threshold, smallest_share))
    plan.check(workload)
    assert np.array_equal(plan.mixed_ML, workload.unknown_MLR.sum(axis=2) > 0)
    # Known rows where quotas send them, expected ones at home.
    loads_MLR = workload.expected_loads(plan.home)
    before_MLR = loads_MLR.copy()
    for (m, layer, _, expert), rows in np.ndenumerate(workload.token_counts_MLRE):
        before_MLR[m, layer, plan.home[layer, expert]] += rows
        loads_MLR[m, layer, plan.home[layer, expert]] += rows
    for m, layer in np.ndindex(plan.num_micro_steps, plan.num_layers):
        for p in plan.replicas_of(m, layer):
            share = plan.quota_tokens[plan.quota_starts[p] : plan.quota_starts[p + 1]].sum()
            loads_MLR[m, layer, plan.home[layer, plan.replica_experts[p]]] -= share
            loads_MLR[m, layer, plan.replica_ranks[p]] += share
    assert np.all(loads_MLR.max(axis=2) <= before_MLR.max(axis=2))
    assert np.array_equal(loads_MLR, plan.rank_loads(workload))
    assert np.array_equal(before_MLR, workload.home_loads(plan.home))
    assert gap_to_bound(plan, workload, 4) >= -1e-7
    assert np.all(cross_node_rows(plan, workload) <= workload.estimated_MLRE.sum(axis=(2, 3)))


@settings(max_examples=30, deadline=None)
@given(workloads(), st.integers(0, 3))
def test_steps_without_unknown_routes_are_planned_as_known(
    case: tuple[Workload, Schedule, Placement], slots: int
) -> None:
    counts_MLRE, schedule, placement = case[0].token_counts_MLRE, *case[1:]
    cluster, chosen = ClusterSpec(placement.home.max() + 1, 1, slots), PlanSettings(1.0, 1)
    zeros = Workload(counts_MLRE, np.zeros(counts_MLRE.shape[:3], np.int32))
    assert zeros.estimated_MLRE is counts_MLRE
    plans = [plan_step(load, schedule, placement, cluster, chosen) for load in (zeros, Workload.known(counts_MLRE))]
    assert plans[0].hash == plans[1].hash
    assert not plans[0].mixed_ML.any()


@settings(max_examples=30, deadline=None)
@given(workloads())
def test_steps_without_known_routes_have_no_replicas(case: tuple[Workload, Schedule, Placement]) -> None:
    workload, schedule, placement = case
    rows_MLR = workload.token_counts_MLRE.sum(axis=3) + workload.unknown_MLR
    nothing = Workload(np.zeros_like(workload.token_counts_MLRE), rows_MLR)
    cluster = ClusterSpec(workload.num_ranks, workload.num_ranks, 2)
    plan = plan_step(nothing, schedule, placement, cluster, PlanSettings(1.0, 1))
    plan.check(nothing)
    assert plan.num_replicas == 0
    assert np.array_equal(plan.rank_loads(nothing).sum(axis=2), rows_MLR.sum(axis=2))


def half_known(unknown: int, ranks: int = 2) -> tuple[Workload, StepPlan]:
    """Rank 0 is home to a hot expert. Micro-step 0 knows its routes, micro-step 1 lacks `unknown` rows beside 400."""
    counts_MLRE = np.zeros((2, 1, ranks, ranks), np.int32)
    counts_MLRE[0, 0, 0, 0] = 2999
    counts_MLRE[0, 0, 0, 1:] = 999
    counts_MLRE[1, 0, 0, 0] = 400
    counts_MLRE[0, 0, 0, 0] -= 400
    workload = Workload(counts_MLRE, np.zeros((2, 1, ranks), np.int32))
    workload.unknown_MLR[1, 0, 1] = unknown
    schedule = random_schedule(np.random.default_rng(0), 0, num_ranks=ranks, num_micro_steps=2)
    placement = Placement.contiguous(1, ranks, ranks)
    return workload, plan_step(workload, schedule, placement, ClusterSpec(ranks, 1, 1), PlanSettings(1.0, 1))


@pytest.mark.parametrize(("unknown", "moved"), [(0, 200), (400, 300), (800, 400), (8000, 400)])
def test_known_rows_make_room_for_expected_ones(unknown: int, moved: int) -> None:
    """Three of four unknown rows are expected at rank 0, which gives away as many more known rows as that asks for."""
    workload, plan = half_known(unknown)
    assert workload.expected_loads(plan.home)[1, 0].tolist() == [unknown * 3 // 4, unknown // 4]
    (replica,) = plan.replicas_of(1, 0)
    assert plan.quota_tokens[plan.quota_starts[replica] : plan.quota_starts[replica + 1]].tolist() == [moved]
    # Rows that cross from node 0 to node 1, and from 1 to 0: unknown ones come from rank 1.
    assert cross_node_rows(plan, workload)[1, 0] == moved + unknown * 3 // 4
    # The bound counts expected rows, too.
    assert gap_to_bound(plan, workload, 2) == pytest.approx(0, abs=1e-3)


def test_no_rank_is_relieved_below_the_busiest_expected_rows() -> None:
    """Rank 0 expects 6,000 rows, so that it gives away its 500 known ones; rank 2 keeps its 5,700, above the mean."""
    counts_MLRE = np.zeros((2, 1, 3, 3), np.int32)
    counts_MLRE[0, 0, 0] = [5499, 999, 299]
    counts_MLRE[1, 0, 0] = [500, 0, 2700]
    workload = Workload(counts_MLRE, np.zeros((2, 1, 3), np.int32))
    workload.unknown_MLR[1, 0, 0] = 10_000
    schedule = random_schedule(np.random.default_rng(0), 0, num_ranks=3, num_micro_steps=2)
    plan = plan_step(workload, schedule, Placement.contiguous(1, 3, 3), ClusterSpec(3, 3, 2), PlanSettings(1.0, 1))
    assert workload.expected_loads(plan.home)[1, 0].tolist() == [6000, 1000, 3000]
    (replica,) = plan.replicas_of(1, 0)
    assert (plan.replica_experts[replica], plan.replica_ranks[replica]) == (0, 1)
    assert plan.rank_loads(workload)[1, 0].tolist() == [6000, 1500, 5700]
    bound = load_bound(np.array([500, 0, 2700]), np.arange(3), 3, 2, np.array([6000, 1000, 3000]))
    assert bound == pytest.approx(6000)
