"""The order of micro-steps: a permutation within mini-batches, chosen by the replicas they share."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import planner_reference as reference
from helpers.random_plans import random_plan
from trimtab import ClusterSpec, Schedule, StepPlan, Workload
from trimtab.planner.schedule.ordering import order_for_reuse, reordered, shared_replicas


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Random plans of up to three mini-batches; so few experts that micro-steps share replicas by chance."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    micro_steps, layers, ranks = draw(st.integers(1, 7)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    batches = np.sort(rng.integers(0, draw(st.integers(1, 3)), micro_steps)).astype(np.int32)
    counts = rng.integers(0, 9, (micro_steps, layers, ranks, ranks * 2)).astype(np.int32)
    sequences = int(rng.integers(0, 20))
    schedule = Schedule(
        rng.integers(0, micro_steps, sequences).astype(np.int32),
        rng.integers(0, ranks, sequences).astype(np.int32),
        batches,
        ranks,
    )
    return random_plan(rng, Workload.known(counts), schedule, slots=draw(st.integers(0, 2)))


@settings(max_examples=80, deadline=None)
@given(plans())
def test_shared_replicas_are_those_that_two_sets_have(plan: StepPlan) -> None:
    sets = reference.replica_sets(plan)
    shared_MM = shared_replicas(plan.replicas, plan.num_micro_steps)
    for m, other in np.ndindex(shared_MM.shape):
        assert shared_MM[m, other] == (len(sets[m] & sets[other]) if m != other else 0)


@settings(max_examples=80, deadline=None)
@given(plans())
def test_the_next_micro_step_shares_most_with_the_last(plan: StepPlan) -> None:
    sets, batches = reference.replica_sets(plan), plan.mini_batch_of_micro_step
    order = order_for_reuse(plan.replicas, plan.mini_batch_of_micro_step).tolist()
    assert sorted(order) == list(range(plan.num_micro_steps))
    assert np.array_equal(batches[order], batches)
    for i, m in enumerate(order[1:], start=1):
        left = [later for later in order[i:] if batches[later] == batches[m]]
        before = order[i - 1]
        if batches[before] == batches[m]:
            assert len(sets[m] & sets[before]) == max(len(sets[x] & sets[before]) for x in left)


@settings(max_examples=40, deadline=None)
@given(plans(), st.integers(0, 99))
def test_reordering_keeps_sequences_together(plan: StepPlan, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(plan.num_micro_steps)
    moved = reordered(plan.schedule, order)
    for place, m in enumerate(order):
        assert np.array_equal(moved.micro_step == place, plan.micro_step == m)
    assert np.array_equal(moved.rank, plan.rank)


def test_equal_micro_steps_stand_together() -> None:
    """Hot experts 0, 2, 0, 2: after ordering 0, 0, 2, 2."""
    replicas = [np.array([[expert, 1 - expert // 2]]) for expert in (0, 2, 0, 2)]
    counts = np.full((4, 1, 2, 4), 5, np.int32)
    workload = Workload.known(counts)
    schedule = Schedule(np.arange(4, dtype=np.int32), np.zeros(4, np.int32), np.zeros(4, np.int32), 2)
    home = random_plan(np.random.default_rng(0), workload, schedule, slots=0).placement
    plan = StepPlan.from_instances(
        schedule, home, replicas, [np.array([[3, 3]])] * 4, mixed_ML=workload.mixed_ML, cluster=ClusterSpec(2, 2, 1)
    )
    plan.check(workload)
    assert order_for_reuse(plan.replicas, plan.mini_batch_of_micro_step).tolist() == [0, 2, 1, 3]
