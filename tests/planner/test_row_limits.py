"""Row limits: met in every instance, or refused with a limit that can be kept."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.linear_program import LinearProgram
from helpers.planner_steps import (
    Instance,
    Replicas,
    Step,
    instances_with_replicas,
    listed,
    random_homes,
    shares_of,
    steady_step,
    steps,
    with_missing_routes,
)
from helpers.random_plans import random_schedule
from trimtab import ClusterSpec, StepPlan, Workload
from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.planner import PlannedStep, PlanSettings, plan_step
from trimtab.planner.plan.plan_settings import refuse
from trimtab.planner.replicas.row_limit import meet_limit


def least_excess(instance: Instance, replicas: Replicas, most_rows: int) -> int:
    """Rows above the limit that remain with the best shares of these copies, over all ranks: a linear program."""
    places = [(e, int(rank)) for e, rank in enumerate(instance.home_E)] + [replica[:2] for replica in replicas]
    program = LinearProgram([0.0] * len(places) + [1.0] * instance.ranks)
    for expert, tokens in enumerate(instance.counts_E):
        mine = [i for i, place in enumerate(places) if place[0] == expert]
        program.bound(dict.fromkeys(mine, 1.0), least=tokens, most=tokens)
    for rank, fixed in enumerate(instance.fixed_R):
        mine = [i for i, place in enumerate(places) if place[1] == rank]
        program.bound(dict.fromkeys(mine, 1.0) | {len(places) + rank: -1.0}, most=most_rows - fixed)
    return round(program.least_cost())


@settings(max_examples=150)
@given(instances_with_replicas(), st.floats(0.6, 2))
def test_shares_meet_the_limit_if_any_shares_of_these_copies_do(case: tuple[Instance, Replicas], factor: float) -> None:
    instance, replicas = case
    most_rows = int(factor * instance.loads([]).sum() // instance.ranks)
    shares = shares_of(replicas)
    count, highest = meet_limit(instance.kernel_instance(), shares, len(replicas), most_rows)
    found = listed(shares, count)
    loads_R = instance.loads(found)
    assert highest == loads_R.max()
    assert all(tokens > 0 for *_, tokens in found)
    assert {replica[:2] for replica in found} <= {replica[:2] for replica in replicas}
    moved_E = np.zeros_like(instance.counts_E)
    np.add.at(moved_E, [expert for expert, *_ in found], [tokens for *_, tokens in found])
    assert (moved_E <= instance.counts_E).all()
    assert np.maximum(loads_R - most_rows, 0).sum() == least_excess(instance, replicas, most_rows)


def rank_loads(step: Step, planned: PlannedStep) -> list[Array]:
    """Of each group, `[M, L, R]`."""
    workloads = step.workloads(planned.schedule)
    return [plan.rank_loads(workload) for plan, workload in zip(planned.plans, workloads, strict=True)]


def with_limits(step: Step, **limits: Any) -> Step:
    return replace(step, settings=replace(step.settings, **limits))


def named_limit(error: InputError) -> int:
    """The one that the message says can be kept."""
    found = re.search(r"; ([\d,]+) can be kept with \d slots per rank;", str(error))
    assert found
    return int(found[1].replace(",", ""))


def assert_even(loads_MLR: Array) -> None:
    """To the row."""
    assert (loads_MLR <= -(-loads_MLR.sum(axis=2, keepdims=True) // loads_MLR.shape[2])).all()


@settings(max_examples=80)
@given(steps(), st.floats(0.7, 2.5))
def test_a_limit_is_kept_in_every_instance_or_refused_with_one_that_can_be(step: Step, factor: float) -> None:
    assume(not step.sequences.unknown_SL.any())
    free = rank_loads(step, step.plan())
    limit = max(int(factor * max(loads.mean(axis=2).max() for loads in free)), 1)
    try:
        planned = with_limits(step, max_rows_per_rank=limit).plan()
    except InputError as error:
        assert f"max_rows_per_rank={limit:,} can't be kept: in micro-step " in str(error)
        assert named_limit(error) > limit
        limit = named_limit(error)
        planned = with_limits(step, max_rows_per_rank=limit).plan()
    assert max(loads.max() for loads in rank_loads(step, planned)) <= limit


@settings(max_examples=60)
@given(steps())
def test_exact_plans_are_even_to_the_row_or_refused(step: Step) -> None:
    assume(not step.sequences.unknown_SL.any())
    try:
        planned = with_limits(step, exact=True).plan()
    except InputError as error:
        assert re.match(r"exact=True can't be kept: in micro-step \d+, MoE layer \d+, ", str(error))
        return
    for loads_MLR in rank_loads(step, planned):
        assert_even(loads_MLR)


@pytest.mark.parametrize("seed", [64, 104, 134, 170, 244])
def test_a_named_limit_is_kept_where_sequences_could_also_be_grouped_by_routing(seed: int) -> None:
    """In these steps it is kept by sequences packed by time, not by those grouped by routing."""
    step = steady_step(seed, per_node=1, slots=0, top_k=1, sequences=12)
    step = replace(step, mini_batch=np.zeros(12, np.int64))
    with pytest.raises(InputError) as refused:
        with_limits(step, max_rows_per_rank=5).plan()
    limit = named_limit(refused.value)
    planned = with_limits(step, max_rows_per_rank=limit).plan()
    assert max(loads.max() for loads in rank_loads(step, planned)) <= limit


def test_the_named_limit_is_one_that_was_planned() -> None:
    """Homes that are chosen for a limit may be worse than those for exact loads."""

    def plan_loads(settings: PlanSettings) -> list[Array]:
        return [np.array([[[114 if settings.exact else 116, 50]]])]

    error = refuse(PlanSettings(max_rows_per_rank=41), 0, plan_loads)
    assert named_limit(error) == 116


def test_exact_is_possible_with_enough_slots() -> None:
    """Every rank may have every expert."""
    for seed in range(10):
        step = steady_step(seed, slots=6, experts=8, ranks=4, settings=PlanSettings(exact=True))
        assert_even(*rank_loads(step, step.plan()))


def test_the_named_limit_is_tight() -> None:
    """One less is refused, where homes can't move; replicas there are as near to it as a linear program."""
    for seed in range(8):
        step = steady_step(seed, slots=1)
        with pytest.raises(InputError) as refused:
            with_limits(step, max_rows_per_rank=1).plan(may_move=False)
        smallest = named_limit(refused.value)
        planned = with_limits(step, max_rows_per_rank=smallest).plan(may_move=False)
        assert max(loads.max() for loads in rank_loads(step, planned)) == smallest
        with pytest.raises(InputError, match=f"max_rows_per_rank={smallest - 1:,} can't be kept"):
            with_limits(step, max_rows_per_rank=smallest - 1).plan(may_move=False)


def test_a_limit_that_is_kept_anyway_changes_nothing() -> None:
    for seed in range(6):
        step = steady_step(seed)
        planned = step.plan()
        # Also the candidates that were not chosen have fewer.
        most = 4 * int(max(loads.max() for loads in rank_loads(step, planned)))
        limited = with_limits(step, max_rows_per_rank=most).plan()
        for plan, other in zip(limited.plans, planned.plans, strict=True):
            assert all(np.array_equal(*values) for values in zip(plan.replicas, other.replicas, strict=True))


@pytest.mark.parametrize("limits", [{"max_rows_per_rank": 10_000}, {"exact": True}])
def test_steps_with_unknown_routes_have_no_limits(limits: dict[str, Any]) -> None:
    step = steady_step(0, settings=PlanSettings(**limits))
    step = replace(step, trace=with_missing_routes(np.random.default_rng(0), step.trace))
    with pytest.raises(InputError, match=r"limited: micro-step \d+, MoE layer \d+ has tokens of unknown route"):
        step.plan()


def test_replicas_of_a_fixed_schedule_keep_to_the_limit() -> None:
    """`plan_step` plans replicas and split alone."""
    rng = np.random.default_rng(5)
    step = steady_step(5)
    schedule = random_schedule(rng, step.trace.num_sequences, num_ranks=4, num_micro_steps=2)
    workload = Workload.from_sequences(step.sequences, schedule)
    homes = random_homes(rng, 2, 8, 4)

    def plan(workload: Workload, *, slots: int = 1, **limits: Any) -> StepPlan:
        return plan_step(workload, schedule, homes, ClusterSpec(4, 2, slots), PlanSettings(**limits))

    assert_even(plan(workload, slots=6, exact=True).rank_loads(workload))
    with pytest.raises(InputError, match="max_rows_per_rank=1 can't be kept") as refused:
        plan(workload, max_rows_per_rank=1)
    smallest = named_limit(refused.value)
    assert plan(workload, max_rows_per_rank=smallest).rank_loads(workload).max() == smallest
    with pytest.raises(InputError, match="has tokens of unknown route"):
        plan(Workload.from_trace(with_missing_routes(rng, step.trace), schedule), max_rows_per_rank=10**6)
