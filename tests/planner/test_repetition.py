"""The same input gives the same plan, however it is added, planned or stored; any other input another hash."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.planner_steps import Step, free_moves_only, free_replicas, steady_step, steps
from trimtab import ClusterSpec, StepPlan
from trimtab.cluster import StepCosts


@settings(max_examples=15)
@given(steps(), st.sampled_from([free_replicas, free_moves_only]))
def test_threads_and_repetition_change_nothing(step: Step, costs_of: Callable[[ClusterSpec], StepCosts]) -> None:
    first, *others = (step.plan(costs=costs_of(step.cluster), threads=threads) for threads in (1, 2, 4, 1))
    for other in others:
        assert [plan.hash for plan in other.plans] == [plan.hash for plan in first.plans]
        assert other.chosen_strategy == first.chosen_strategy
        assert (other.strategies_s, other.move_life) == (first.strategies_s, first.move_life)
        assert other.parts_s == first.parts_s


@settings(max_examples=25)
@given(steps(), st.integers(0, 2**32))
def test_adding_in_pieces_and_keeping_some_equals_adding_those_at_once(step: Step, seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = step.trace.num_sequences
    keep = rng.permutation(count)[: rng.integers(1, count + 1)]
    cuts = np.sort(rng.integers(0, count + 1, 2))
    pieces, whole = step.planner(), step.planner()
    for piece in np.split(np.arange(count), cuts):
        pieces.add(step.trace.select(piece))
    whole.add(step.trace.select(keep))
    kept = pieces.finish(token_budget=step.token_budget, mini_batch=step.mini_batch[keep], keep=keep)
    alone = whole.finish(token_budget=step.token_budget, mini_batch=step.mini_batch[keep])
    assert [plan.hash for plan in kept] == [plan.hash for plan in alone]
    assert np.array_equal(pieces.placement.home, whole.placement.home)


@settings(max_examples=20)
@given(steps())
def test_a_planner_plans_what_the_function_does_and_goes_on_from_its_homes(step: Step) -> None:
    planned = step.plan()
    schedule, placement, plans = planned.schedule, planned.placement, planned.plans
    past_PLE = step.sequences.counts_SLE.sum(axis=0, dtype=np.int64)[None]
    stateful = step.planner()
    for _ in range(2):
        stateful.add(step.trace)
        actual = stateful.finish(token_budget=step.token_budget, mini_batch=step.mini_batch)
        assert [plan.hash for plan in actual] == [plan.hash for plan in plans]
        assert stateful.schedule is not None
        assert np.array_equal(stateful.schedule.rank, schedule.rank)
        assert np.array_equal(stateful.placement.home, placement.home)
        planned = replace(step, placement=placement).plan(past_PLE=past_PLE)
        schedule, placement, plans = planned.schedule, planned.placement, planned.plans


def test_the_hash_knows_every_field() -> None:
    plan = steady_step(1).plan().plans[0]
    assert plan.num_replicas
    hashes = {plan.hash}
    for field in fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, np.ndarray):
            value = value.copy()
            value.reshape(-1)[-1] = ~value.reshape(-1)[-1] if value.dtype == bool else value.reshape(-1)[-1] + 1
        else:
            value = value + " " if isinstance(value, str) else value + 1
        hashes.add(replace(plan, **{field.name: value}).hash)
    assert len(hashes) == 1 + len(fields(plan))


def test_settings_can_be_read_back_from_the_plan() -> None:
    step = steady_step(1, groups=2)
    planned = step.plan()
    values = json.loads(planned.plans[0].settings)
    found, predicted = values.pop("costs"), values.pop("predicted_s")
    strategy = planned.strategy
    assert strategy != "nothing"
    assert list(predicted) == list(planned.strategies_s)
    assert predicted == pytest.approx(planned.strategies_s, rel=1e-3)
    assert values == asdict(step.settings) | {"groups": 2, "token_budget": step.token_budget, "strategy": strategy}
    costs = free_replicas(step.cluster)
    operations = {name: float(value) for name, value in costs.operations._asdict().items()}
    assert found.pop("operations") == pytest.approx(operations)
    assert found == {"forwards": costs.forwards, "ring_layers": costs.ring_layers}


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(step=steps())
def test_saved_plans_come_back_whole(step: Step, tmp_path: Path) -> None:
    for plan in step.plan().plans:
        plan.save(tmp_path / "plans" / "step.npz")
        back = StepPlan.load(tmp_path / "plans" / "step.npz")
        assert back.hash == plan.hash
        for field in fields(plan):
            value, other = getattr(plan, field.name), getattr(back, field.name)
            assert np.array_equal(value, other)
            assert type(value) is type(other)
            if isinstance(value, np.ndarray):
                assert value.dtype == other.dtype
        assert [path.name for path in (tmp_path / "plans").iterdir()] == ["step.npz"]
