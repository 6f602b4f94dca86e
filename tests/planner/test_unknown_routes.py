"""Unknown routes: rows are expected at homes in proportion to known ones, and known rows are planned around them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from benchmarks.plan_bounds import gap_to_bound, load_bound
from helpers import planner_reference as reference
from helpers.planner_steps import workloads
from helpers.random_plans import random_schedule
from trimtab import ClusterSpec, Placement, Schedule, StepPlan, Workload
from trimtab.planner import PlanSettings, plan_step
from trimtab.planner.plan.prediction import cross_node_rows


@settings(max_examples=80)
@given(workloads())
def test_unknown_rows_are_where_the_reference_expects_them(case: tuple[Workload, Schedule, Placement]) -> None:
    workload, _, placement = case
    expected_MLR = np.zeros(workload.unknown_MLR.shape, np.int64)
    for (m, layer, expert), rows in np.ndenumerate(reference.expected_experts(workload)):
        expected_MLR[m, layer, placement.home[layer, expert]] += rows
    loads_MLR = workload.expected_loads(placement.home)
    assert loads_MLR.dtype == np.int64
    assert np.array_equal(loads_MLR, expected_MLR)
    estimated_MLRE = workload.estimated_MLRE.astype(np.int64)
    assert np.array_equal(estimated_MLRE, reference.estimated(workload))
    added = Workload.known(estimated_MLRE - workload.token_counts_MLRE)
    assert np.array_equal(added.token_counts_MLRE.sum(axis=3), workload.unknown_MLR)
    assert np.array_equal(added.home_loads(placement.home), loads_MLR)
    assert int(estimated_MLRE.sum()) == workload.num_rows


def test_large_loads_do_not_overflow() -> None:
    """Two billion known rows of an expert over the step, and a hundred million unknown ones of an instance."""
    counts_MLRE = np.zeros((4, 1, 4, 4), np.int32)
    counts_MLRE[:, :, :, 0] = 125_000_000
    workload = Workload(counts_MLRE, np.full((4, 1, 4), 25_000_000, np.int32))
    loads_MLR = workload.expected_loads(np.arange(4))
    assert loads_MLR[0, 0].tolist() == [99_999_999, 0, 0, 1]
    assert workload.estimated_MLRE.sum(axis=3, dtype=np.int64).tolist() == [[[150_000_000] * 4]] * 4


def plan_two(counts_ME: list[list[int]], unknown_R: list[int], per_node: int, slots: int) -> tuple[Workload, StepPlan]:
    """An expert on each rank, all known rows from rank 0. Only the second of two micro-steps has unknown rows."""
    ranks = len(unknown_R)
    counts_MLRE = np.zeros((2, 1, ranks, ranks), np.int32)
    counts_MLRE[:, 0, 0] = counts_ME
    workload = Workload(counts_MLRE, np.zeros((2, 1, ranks), np.int32))
    workload.unknown_MLR[1, 0] = unknown_R
    schedule = random_schedule(np.random.default_rng(0), 0, num_ranks=ranks, num_micro_steps=2)
    cluster, homes = ClusterSpec(ranks, per_node, slots), Placement.contiguous(1, ranks, ranks)
    return workload, plan_step(workload, schedule, homes, cluster, PlanSettings(1.0, 1))


@pytest.mark.parametrize(("unknown", "moved"), [(0, 200), (400, 300), (800, 400), (8000, 400)])
def test_known_rows_make_room_for_expected_ones(unknown: int, moved: int) -> None:
    """Three of four unknown rows are expected at rank 0, which gives away as many more known rows as that asks for."""
    workload, plan = plan_two([[2599, 999], [400, 0]], [0, unknown], 1, 1)
    assert workload.expected_loads(plan.home)[1, 0].tolist() == [unknown * 3 // 4, unknown // 4]
    (replica,) = plan.replicas_of(1, 0)
    assert plan.quota_tokens[plan.quota_starts[replica] : plan.quota_starts[replica + 1]].tolist() == [moved]
    # Rows that cross from node 0 to node 1, and from 1 to 0: unknown ones come from rank 1.
    assert cross_node_rows(plan, workload)[1, 0] == moved + unknown * 3 // 4
    # The bound counts expected rows, too.
    assert gap_to_bound(plan, workload, 2) == pytest.approx(0, abs=1e-3)


def test_no_rank_is_relieved_below_the_busiest_expected_rows() -> None:
    """Rank 0 expects 6,000 rows, so that it gives away its 500 known ones; rank 2 keeps its 5,700, above the mean."""
    workload, plan = plan_two([[5499, 999, 299], [500, 0, 2700]], [10_000, 0, 0], 3, 2)
    assert workload.expected_loads(plan.home)[1, 0].tolist() == [6000, 1000, 3000]
    (replica,) = plan.replicas_of(1, 0)
    assert (plan.replica_experts[replica], plan.replica_ranks[replica]) == (0, 1)
    assert plan.rank_loads(workload)[1, 0].tolist() == [6000, 1500, 5700]
    bound = load_bound(np.array([500, 0, 2700]), np.arange(3), 3, 2, np.array([6000, 1000, 3000]))
    assert bound == pytest.approx(6000)
