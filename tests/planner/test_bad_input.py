"""A wrong input raises an InputError of one line, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from helpers.planner_steps import skewed_trace, steady_step
from trimtab import ClusterSpec, InputError, Placement, Schedule, StepPlan, Workload
from trimtab.planner import PlanSettings, pack_by_length, plan_step


def test_files_that_are_no_plan_are_refused() -> None:
    whole = steady_step(1).plan().plans[0].to_bytes()
    at = whole.rindex(b"settings.npy") - 46 + 10
    other_compression = whole[:at] + b"\x63" + whole[at + 1 :]
    cut = [whole[:end] for end in range(1, len(whole) - 1, 11)]
    for data in (b"PK\x03\x04", b"\x93NUMPY", b"", other_compression, *cut):
        with pytest.raises(InputError, match="not a step plan") as caught:
            StepPlan.from_bytes(data)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("micro_step", 99), ("rank", 99), ("rank", -1), ("mini_batch_of_micro_step", -1), ("replica_paths", 9)],
)
def test_plans_with_impossible_places_are_refused(field: str, value: int) -> None:
    step = steady_step(1)
    planned = step.plan()
    schedule, plan = planned.schedule, planned.plan
    values = getattr(plan, field).copy()
    values[-1] = value
    with pytest.raises(InputError, match="invalid plan"):
        replace(plan, **{field: values}).check(step.workloads(schedule)[0])


@pytest.mark.parametrize("field", ["micro_step", "rank", "mini_batch_of_micro_step"])
def test_plans_with_schedules_of_unequal_length_are_refused(field: str) -> None:
    step = steady_step(1)
    planned = step.plan()
    shorter = replace(planned.plan, **{field: getattr(planned.plan, field)[:-1]})
    with pytest.raises(InputError, match=r"invalid plan: .*differ in (length|number)"):
        shorter.check(step.workloads(planned.schedule)[0])


def test_a_plan_with_too_many_copies_or_tokens_is_refused() -> None:
    """Two ranks with two experts each and one slot; source 1 has 7 tokens of every expert."""
    workload = Workload.known(np.full((1, 1, 2, 4), 7, np.int32))
    schedule = Schedule(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(1, np.int32), 2)

    def check(replicas: list[tuple[int, int]], tokens: int) -> None:
        StepPlan.from_instances(
            schedule, Placement.contiguous(1, 4, 2), [np.array(replicas)], [np.tile([[0, tokens]], (len(replicas), 1))],
            mixed_ML=workload.mixed_ML, cluster=ClusterSpec(2, 2, 1),
        ).check(workload)  # fmt: skip

    check([(0, 1), (2, 0)], 7)
    with pytest.raises(InputError, match="a rank holds more copies than its share of homes and its slots"):
        check([(0, 1), (1, 1)], 7)
    with pytest.raises(InputError, match="a source sends replicas more tokens than it has for the expert"):
        check([(0, 1), (2, 0)], 8)


def test_a_plan_with_a_source_that_is_no_rank_is_refused() -> None:
    step = steady_step(1)
    planned = step.plan()
    sources = planned.plan.quota_sources.copy()
    assert len(sources)
    for wrong in (planned.plan.num_ranks, -1):
        sources[-1] = wrong
        with pytest.raises(InputError, match="a quota's source rank doesn't exist"):
            replace(planned.plan, quota_sources=sources).check(step.workloads(planned.schedule)[0])


IMPOSSIBLE: dict[str, list[float]] = {
    "threshold": [math.nan, math.inf, 0.9, 1e4], "smallest_share": [0], "move_life": [math.nan, math.inf, 0.9],
    "least_gain": [math.nan, math.inf], "max_rows_per_rank": [0],
}  # fmt: skip


def test_impossible_settings_are_refused() -> None:
    for name, values in IMPOSSIBLE.items():
        PlanSettings(**{name: cast(Any, 1)})
        for value in values:
            with pytest.raises(InputError, match="it should be"):
                PlanSettings(**{name: cast(Any, value)})


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"token_budget": 10}, id="a sequence over the budget"),
        pytest.param({"placement": Placement.contiguous(2, 8, 8)}, id="homes on more ranks"),
        pytest.param({"placement": Placement.contiguous(2, 8, 2)}, id="homes on fewer ranks"),
        pytest.param({"placement": Placement.contiguous(3, 8, 4)}, id="homes of more layers"),
        pytest.param({"placement": Placement.contiguous(1, 8, 4)}, id="homes of fewer layers"),
        pytest.param({"placement": Placement.contiguous(2, 12, 4)}, id="homes of more experts"),
        pytest.param({"placement": Placement(np.full((2, 8), -1, np.int16))}, id="homes nowhere"),
        pytest.param({"mini_batch": np.zeros(3, int)}, id="too few mini-batches"),
        pytest.param({"groups": 0}, id="no group"),
    ],
)
def test_bad_input_is_refused_in_one_line(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        steady_step(0).plan(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mini_batch", [[0, 0], [0, 0, 0, 0], [0, -1, 0]], ids=["few", "many", "negative"])
def test_mini_batches_that_do_not_fit_the_sequences_are_refused(mini_batch: list[int]) -> None:
    with pytest.raises(InputError) as caught:
        pack_by_length([5, 6, 7], num_ranks=2, token_budget=10, mini_batch=mini_batch)
    assert "\n" not in str(caught.value)


def test_numpy_integers_are_integers() -> None:
    step, share = steady_step(0), cast(int, np.int64(4))
    given = step.plan(token_budget=np.int64(80), settings=PlanSettings(1.0, share))
    expected = step.plan(token_budget=80, settings=PlanSettings(1.0, 4))
    assert [plan.hash for plan in given.plans] == [plan.hash for plan in expected.plans]


def test_a_planner_refuses_other_models_and_empty_steps() -> None:
    stateful = steady_step(0).planner()
    with pytest.raises(InputError, match="nothing to plan; add the step's sequences first"):
        stateful.finish(token_budget=10)
    for layers, experts in ((3, 8), (2, 6)):
        trace = skewed_trace(np.random.default_rng(0), sequences=1, layers=layers, experts=experts, top_k=2)
        with pytest.raises(InputError, match=f"{layers} MoE layers, {experts} experts.*for 2 layers, 8 experts"):
            stateful.add(trace)


def test_a_refused_budget_can_be_raised() -> None:
    step = steady_step(0)
    stateful = step.planner()
    stateful.add(step.trace)
    with pytest.raises(InputError):
        stateful.finish(token_budget=1)
    assert stateful.finish(token_budget=step.token_budget)


def test_workload_and_cluster_must_have_the_same_ranks() -> None:
    step = steady_step(0)
    planned = step.plan()
    schedule, placement = planned.schedule, planned.placement
    with pytest.raises(InputError, match="the workload is for 4 ranks; the cluster has 2"):
        plan_step(step.workloads(schedule)[0], schedule, placement, ClusterSpec(2, 2))
    other = replace(schedule, micro_step=schedule.micro_step[:3])
    with pytest.raises(InputError, match="places 3 sequences"):
        Workload.from_sequences(step.sequences, other)
    with pytest.raises(InputError, match="places 3 sequences"):
        Workload.from_trace(step.trace, other)
