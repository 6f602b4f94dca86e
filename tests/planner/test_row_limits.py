"""Row limits: met in every instance, or refused with a limit that can be kept."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import highspy
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.planner_steps import Instance, Step, instances, random_homes, steady_step, steps, with_missing_routes
from helpers.random_plans import random_schedule
from trimtab import ClusterSpec, StepPlan, Workload
from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.planner import Planner, PlanSettings, plan_step
from trimtab.planner.planner import GroupPlans
from trimtab.planner.replicas import kernel_values
from trimtab.planner.replicas.kernel_values import Homes, Shares
from trimtab.planner.replicas.row_limit import meet_limit

Replicas = list[tuple[int, int, int]]


@st.composite
def copies(draw: st.DrawFn) -> tuple[Instance, Replicas]:
    """An instance with the planner's replicas, or with any other, some of them without tokens."""
    instance = draw(instances(max_tokens=60))
    if draw(st.booleans()):
        return instance, instance.replicas()
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    left_E, replicas = instance.counts_E.copy(), []
    for expert, rank in rng.permutation([(e, r) for e in range(len(left_E)) for r in range(instance.ranks)]):
        if instance.home_E[expert] != rank and rng.random() < 0.3:
            tokens = int(rng.integers(left_E[expert] + 1)) if rng.random() < 0.5 else 0
            left_E[expert] -= tokens
            replicas.append((int(expert), int(rank), tokens))
    return instance, replicas


def least_excess(instance: Instance, replicas: Replicas, most_rows: int) -> int:
    """Rows above the limit that remain with the best shares of these copies, over all ranks: a linear program."""
    solver = highspy.Highs()
    solver.silent()
    solver.setOptionValue("threads", 1)
    nothing: Any = (0, np.empty(0, np.int32), np.empty(0))
    places = [(e, int(rank)) for e, rank in enumerate(instance.home_E)] + [replica[:2] for replica in replicas]
    for _ in places:
        solver.addCol(0.0, 0.0, highspy.kHighsInf, *nothing)
    for _ in range(instance.ranks):
        solver.addCol(1.0, 0.0, highspy.kHighsInf, *nothing)

    def row(low: float, high: float, columns: list[int], values: list[float]) -> None:
        solver.addRow(low, high, len(columns), np.array(columns, np.int32), np.array(values))

    for expert, tokens in enumerate(instance.counts_E):
        mine = [i for i, place in enumerate(places) if place[0] == expert]
        row(float(tokens), float(tokens), mine, [1.0] * len(mine))
    for rank, fixed in enumerate(instance.fixed_R):
        mine = [i for i, place in enumerate(places) if place[1] == rank]
        values = [1.0] * len(mine) + [-1.0]
        row(-highspy.kHighsInf, float(most_rows - fixed), [*mine, len(places) + rank], values)
    solver.run()
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return round(solver.getInfo().objective_function_value)


@settings(max_examples=150, deadline=None)
@given(copies(), st.floats(0.6, 2))
def test_shares_meet_the_limit_if_any_shares_of_these_copies_do(case: tuple[Instance, Replicas], factor: float) -> None:
    instance, replicas = case
    most_rows = int(factor * instance.loads([]).sum() // instance.ranks)
    given_shares = Shares(*np.array(replicas, np.int64).reshape(-1, 3).T.copy())
    arrays = kernel_values.Instance(instance.counts_E, instance.fixed_R, Homes.of(instance.home_E, instance.ranks))
    count, highest = meet_limit(arrays, given_shares, len(replicas), most_rows)
    found = [(int(e), int(r), int(t)) for e, r, t in np.stack(given_shares)[:, :count].T]
    loads_R = instance.loads(found)
    assert highest == loads_R.max()
    assert all(tokens > 0 for *_, tokens in found)
    assert {replica[:2] for replica in found} <= {replica[:2] for replica in replicas}
    moved_E = np.zeros_like(instance.counts_E)
    np.add.at(moved_E, [expert for expert, *_ in found], [tokens for *_, tokens in found])
    assert (moved_E <= instance.counts_E).all()
    assert np.maximum(loads_R - most_rows, 0).sum() == least_excess(instance, replicas, most_rows)


def rank_loads(step: Step, planned: GroupPlans) -> list[Array]:
    """Of each group, `[M, L, R]`."""
    workloads = step.workloads(planned.schedule)
    return [plan.rank_loads(workload) for plan, workload in zip(planned.plans, workloads, strict=True)]


def replicas_of(plan: StepPlan) -> list[list[int]]:
    """All of its replicas and quotas."""
    return [np.asarray(values).tolist() for values in plan.replicas]


def all_known(step: Step) -> bool:
    """Whether all routes are known."""
    return not step.sequences.unknown_SL.any()


@settings(max_examples=80, deadline=None)
@given(steps(), st.floats(0.7, 2.5))
def test_a_limit_is_kept_in_every_instance_or_refused_with_one_that_can_be(step: Step, factor: float) -> None:
    assume(all_known(step))
    free = rank_loads(step, step.plan())
    limit = max(int(factor * max(loads.mean(axis=2).max() for loads in free)), 1)
    limited = replace(step, settings=replace(step.settings, max_rows_per_rank=limit))
    try:
        planned = limited.plan()
    except InputError as error:
        text = str(error)
        assert f"max_rows_per_rank={limit:,} can't be kept: in micro-step " in text
        found = re.search(r"the smallest that this step allows with \d slots per rank is ([\d,]+);", text)
        assert found
        smallest = int(found[1].replace(",", ""))
        assert smallest > limit
        limited = replace(step, settings=replace(step.settings, max_rows_per_rank=smallest))
        planned, limit = limited.plan(), smallest
    assert max(loads.max() for loads in rank_loads(limited, planned)) <= limit


@settings(max_examples=60, deadline=None)
@given(steps())
def test_exact_plans_are_even_to_the_row_or_refused(step: Step) -> None:
    assume(all_known(step))
    exact = replace(step, settings=replace(step.settings, exact=True))
    try:
        planned = exact.plan()
    except InputError as error:
        assert re.match(
            r"exact=True can't be kept: in micro-step \d+, MoE layer \d+, the busiest rank would", str(error)
        )
        return
    for loads in rank_loads(exact, planned):
        assert (loads <= -(-loads.sum(axis=2, keepdims=True) // loads.shape[2])).all()


def test_exact_is_possible_with_enough_slots() -> None:
    """Every rank may have every expert."""
    for seed in range(10):
        step = steady_step(seed, slots=6, experts=8, ranks=4, settings=PlanSettings(exact=True))
        for loads in rank_loads(step, step.plan()):
            assert (loads <= -(-loads.sum(axis=2, keepdims=True) // 4)).all()


def test_the_smallest_limit_is_tight() -> None:
    """One less is refused, where homes can't move; replicas there are as near to it as a linear program."""
    for seed in range(8):
        step = steady_step(seed, slots=1, settings=PlanSettings(max_rows_per_rank=1))
        with pytest.raises(InputError) as refused:
            step.plan(may_move=False)
        smallest = int(re.findall(r"is ([\d,]+);", str(refused.value))[0].replace(",", ""))
        loads = rank_loads(step, replace(step, settings=PlanSettings(max_rows_per_rank=smallest)).plan(may_move=False))
        assert max(each.max() for each in loads) == smallest
        with pytest.raises(InputError, match=f"max_rows_per_rank={smallest - 1:,} can't be kept"):
            replace(step, settings=PlanSettings(max_rows_per_rank=smallest - 1)).plan(may_move=False)


def test_a_limit_that_is_kept_anyway_changes_nothing() -> None:
    for seed in range(6):
        step = steady_step(seed)
        planned = step.plan()
        most = int(max(loads.max() for loads in rank_loads(step, planned)))
        limited = replace(step, settings=replace(step.settings, max_rows_per_rank=most)).plan()
        assert [replicas_of(plan) for plan in limited.plans] == [replicas_of(plan) for plan in planned.plans]


@pytest.mark.parametrize("limits", [{"max_rows_per_rank": 10_000}, {"exact": True}])
def test_steps_with_unknown_routes_have_no_limits(limits: dict[str, Any]) -> None:
    step = steady_step(0, settings=PlanSettings(**limits))
    step = replace(step, trace=with_missing_routes(np.random.default_rng(0), step.trace))
    with pytest.raises(InputError, match=r"limited: micro-step \d+, MoE layer \d+ has tokens of unknown route"):
        step.plan()


def test_a_planner_keeps_to_the_limit_in_every_step() -> None:
    step = steady_step(3, slots=2)
    limit = int(1.2 * max(loads.mean(axis=2).max() for loads in rank_loads(step, step.plan())))
    planner = Planner(step.cluster, step.placement, settings=PlanSettings(max_rows_per_rank=limit))
    for _ in range(3):
        planner.add(step.trace)
        (plan,) = planner.finish(token_budget=step.token_budget, mini_batch=step.mini_batch)
        assert planner.schedule is not None
        (workload,) = step.workloads(planner.schedule)
        assert plan.rank_loads(workload).max() <= limit


def test_replicas_of_a_fixed_schedule_keep_to_the_limit() -> None:
    """`plan_step` plans replicas and split alone."""
    rng = np.random.default_rng(5)
    step = steady_step(5)
    sequences = step.sequences
    number = len(sequences.lengths)
    schedule = random_schedule(rng, number, num_ranks=4, num_micro_steps=2)
    workload = Workload.from_sequences(sequences, schedule)
    cluster, homes = ClusterSpec(4, 2, 6), random_homes(rng, 2, 8, 4)
    loads = plan_step(workload, schedule, homes, cluster, PlanSettings(exact=True)).rank_loads(workload)
    assert (loads <= -(-loads.sum(axis=2, keepdims=True) // 4)).all()
    one = replace(cluster, slots_per_rank=1)
    with pytest.raises(InputError, match="max_rows_per_rank=1 can't be kept") as refused:
        plan_step(workload, schedule, homes, one, PlanSettings(max_rows_per_rank=1))
    smallest = int(re.findall(r"is ([\d,]+);", str(refused.value))[0].replace(",", ""))
    loads = plan_step(workload, schedule, homes, one, PlanSettings(max_rows_per_rank=smallest)).rank_loads(workload)
    assert loads.max() == smallest
    unknown = Workload.from_trace(with_missing_routes(rng, step.trace), schedule)
    with pytest.raises(InputError, match="has tokens of unknown route"):
        plan_step(unknown, schedule, homes, one, PlanSettings(max_rows_per_rank=10**6))
