"""The lower bound of a step: no plan is faster, and it is reached where all its terms can hold at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from benchmarks.step_bound import bound_step
from helpers.simulated_steps import Case, cases, free_costs
from trimtab import ClusterSpec, Placement, Schedule, StepPlan, Workload
from trimtab.array_type import Array
from trimtab.policies import Traits
from trimtab.simulator.step import StepSettings

LITTLE = 1 + 1e-9


def bound_of(case: Case, slots: int | None = None) -> dict[str, float]:
    return bound_step(
        case.plan.schedule, case.workload, case.lengths, case.costs,
        ranks_per_node=case.plan.ranks_per_node,
        slots=case.plan.slots_per_rank if slots is None else slots,
        settings=case.settings,
    )  # fmt: skip


@settings(max_examples=300)
@given(cases(max_groups=1))
def test_no_plan_is_faster_than_the_bound(case: Case) -> None:
    case = case.but(ideal=False)
    bound_s, step = bound_of(case), case.run()
    assert list(bound_s) == list(step.parts_s)
    assert sum(bound_s.values()) <= step.step_time_s * LITTLE
    # Also where rows are all that takes time, in each way of sending them.
    for forwards, top_k in ((False, 1), (True, 1), (True, 3)):
        costs = free_costs(near_row_s=1.0, far_row_s=3.0, forwards=forwards, top_k=top_k)
        rows = replace(case, costs=costs).but(hops=1)
        assert sum(bound_of(rows).values()) <= rows.run().step_time_s * LITTLE
    # More slots never raise it.
    more_s = bound_of(case, case.plan.slots_per_rank + 1)
    assert sum(more_s.values()) <= sum(bound_s.values()) * LITTLE


@settings(max_examples=60)
@given(cases(max_groups=1))
def test_one_rank_takes_exactly_the_bound(case: Case) -> None:
    """With one rank nothing is exchanged and no rank waits, so the simulated step takes as long as the bound."""
    counts_MLRE = case.workload.estimated_MLRE.sum(axis=2, keepdims=True, dtype=np.int32)
    layers, experts = case.plan.home.shape
    schedule = replace(case.plan.schedule, rank=np.zeros_like(case.plan.rank), num_ranks=1)
    workload = Workload.known(counts_MLRE)
    plan = plan_without_replicas(schedule, Placement.contiguous(layers, experts, 1), workload, ClusterSpec(1, 1, 0))
    alone = replace(case, plan=plan, workload=workload, cluster=ClusterSpec(1, 1, 0), before=None)
    alone = alone.but(ideal=False, known_at="past", hops=1, copies="none")
    # A batch without micro-steps has no optimizer step in either.
    bound_s, step = bound_of(alone), alone.run()
    assert bound_s == pytest.approx(step.parts_s, rel=1e-9, abs=1e-9 * step.step_time_s)


def plan_without_replicas(
    schedule: Schedule, placement: Placement, workload: Workload, cluster: ClusterSpec
) -> StepPlan:
    instances = workload.num_micro_steps * workload.num_layers
    return StepPlan.from_instances(
        schedule, placement, [np.zeros((0, 2), np.int64)] * instances,
        [np.zeros((0, cluster.ranks), np.int64)] * instances,
        mixed_ML=workload.mixed_ML, cluster=cluster,
    )  # fmt: skip


def rows_case(counts_RE: Array, per_node: int, *, forwards: bool, near_s: float, far_s: float) -> Case:
    """One instance whose rows are all that takes time."""
    ranks, experts = counts_RE.shape
    workload = Workload.known(counts_RE[None, None].astype(np.int32))
    schedule = Schedule(np.zeros(ranks, np.int32), np.arange(ranks, dtype=np.int32), np.zeros(1, np.int32), ranks)
    cluster = ClusterSpec(ranks, per_node, 0)
    plan = plan_without_replicas(schedule, Placement.contiguous(1, experts, ranks), workload, cluster)
    costs = free_costs(near_row_s=near_s, far_row_s=far_s, forwards=forwards)
    traits = Traits(known_at="nothing", transfers_start="never", copies="none")
    return Case(plan, workload, np.ones(ranks, np.int64), costs, cluster, traits, StepSettings(recompute=False))


# Dispatch and combine, in forward and in backward.
ALL_TO_ALLS = 4


def test_rows_that_leave_a_node_are_those_of_all_but_its_best_experts() -> None:
    # Two nodes of two ranks, a home a rank: the first node keeps experts 0 and 1, the second 1 and 3.
    counts_RE = np.array([[8, 1, 0, 2], [1, 4, 3, 0], [0, 5, 1, 9], [2, 5, 0, 1]])
    for forwards in (False, True):
        far = rows_case(counts_RE, 2, forwards=forwards, near_s=0.0, far_s=1.0)
        assert bound_of(far)["dispatch"] == pytest.approx(ALL_TO_ALLS * ((3 + 2) + (1 + 2)) / 4)
        # With a slot on every rank nothing has to leave.
        assert bound_of(far, slots=1)["dispatch"] == 0
    # Rows stay on the rank for its best expert; with forwarding, also on the rank with its number in the other node.
    direct = rows_case(counts_RE, 2, forwards=False, near_s=1.0, far_s=1.0)
    assert bound_of(direct)["dispatch"] == pytest.approx(ALL_TO_ALLS * (3 + 4 + 6 + 3) / 2 / 4)
    near = rows_case(counts_RE, 2, forwards=True, near_s=1.0, far_s=0.0)
    assert bound_of(near)["dispatch"] == pytest.approx(ALL_TO_ALLS * (1 + 1 + 1 + 1) / 4)
    # The slower link counts.
    both = rows_case(counts_RE, 2, forwards=True, near_s=1.0, far_s=2.0)
    assert bound_of(both)["dispatch"] == pytest.approx(ALL_TO_ALLS * 2 * 8 / 4)


def test_a_plan_with_the_best_experts_on_every_node_reaches_the_bound() -> None:
    # Every rank sends as many rows to the other of its node, and to both others, as each other rank does.
    counts_RE = np.array([[9, 6, 1, 1], [6, 9, 1, 1], [1, 1, 9, 6], [1, 1, 6, 9]])
    for forwards in (False, True):
        case = rows_case(counts_RE, 2, forwards=forwards, near_s=0.0, far_s=3.0)
        assert case.run().step_time_s == pytest.approx(sum(bound_of(case).values()))
        # On one node there is only the link inside it.
        case = rows_case(counts_RE, 4, forwards=forwards, near_s=3.0, far_s=1.0)
        assert case.run().step_time_s == pytest.approx(ALL_TO_ALLS * 3.0 * 8)
        assert sum(bound_of(case).values()) == pytest.approx(ALL_TO_ALLS * 3.0 * 8)


def test_gradient_sums_hide_behind_the_last_backward() -> None:
    counts_RE = np.array([[3, 5], [4, 4]])
    case = rows_case(counts_RE, 2, forwards=False, near_s=0.0, far_s=0.0)
    for reduce_s, exposed_s in ((7.0, 0.0), (20.0, 20.0 - 16.0)):
        costs = free_costs(row_s=1.0, expert_backward=2.0, reduce_s=reduce_s, optimizer_s=1.0)
        found = bound_of(replace(case, costs=costs))
        # 16 rows on two ranks: 8 s forward, 16 s backward.
        assert found["experts"] == pytest.approx(3 * 8)
        assert found["optimizer"] == pytest.approx(1 + exposed_s)
