"""Slices of a step, made in any order, are the replicas of the plan that is made in one piece."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from helpers.examples import examples
from helpers.planner_steps import Step, steady_step, steps
from trimtab.planner import GroupPlans, StepPlan
from trimtab.planner.plan.slices import SlicePlanner, from_bytes, layers_of_rank, rounds_of, to_bytes
from trimtab.planner.replicas.replica_table import ReplicaTable


def plans_of_slices(step: Step, header: GroupPlans, rng: np.random.Generator, planning_ranks: int) -> list[StepPlan]:
    """The plans of all groups, from slices that are made in random order and sent as bytes."""
    assert header.slices is not None
    found = []
    for group, workload in enumerate(step.workloads(header.schedule)):
        planner = SlicePlanner.of(header.slices, group, workload, header.placement.home)
        rounds = rounds_of(workload.num_micro_steps)
        parts = [(number, rank) for number in range(len(rounds)) for rank in range(planning_ranks)]
        made = {}
        for place in rng.permutation(len(parts)).tolist():
            number, rank = parts[place]
            layers = layers_of_rank(workload.num_layers, rank, planning_ranks)
            made[number, rank] = from_bytes(to_bytes(planner.plan(rounds[number], layers)))
        tables = [
            ReplicaTable.join_layers([table for rank in range(planning_ranks) for table in made[number, rank]])
            for number in range(len(rounds))
        ]
        table = ReplicaTable.concatenate(tables)
        plan = header.plans[group].with_replicas(table, planner.paths(table))
        entries = header.slices.mirrors[group]
        for node in range(plan.num_ranks // plan.ranks_per_node):
            held = {tuple(entry) for entry in entries[entries[:, 0] == node, 1:].tolist()}
            assert held >= {tuple(entry) for entry in plan.mirror_entries(node).tolist()}
        found.append(plan)
    return found


@settings(deadline=None, max_examples=examples(short=60, long=600))
@given(steps(), st.integers(0, 2**32), st.integers(1, 5))
def test_slices_are_the_replicas_of_the_whole_plan(step: Step, seed: int, planning_ranks: int) -> None:
    header, whole = step.plan(sliced=True), step.plan()
    assert all(plan.num_replicas == 0 for plan in header.plans) or header.slices is None
    if header.slices is None:
        return
    made = plans_of_slices(step, header, np.random.default_rng(seed), planning_ranks)
    for plan, workload in zip(made, step.workloads(header.schedule), strict=True):
        plan.check(workload)
    is_same = (
        whole.choice.strategy == header.choice.strategy
        and np.array_equal(whole.schedule.micro_step, header.schedule.micro_step)
        and np.array_equal(whole.schedule.rank, header.schedule.rank)
    )
    if is_same:
        assert np.array_equal(whole.placement.home, header.placement.home)
        for plan, expected in zip(made, whole.plans, strict=True):
            for actual, wanted in zip(plan.replicas, expected.replicas, strict=True):
                assert np.array_equal(actual, wanted)
                assert actual.dtype == wanted.dtype


def test_a_steady_step_has_slices() -> None:
    step = steady_step(0)
    header = step.plan(sliced=True)
    assert header.slices is not None
    (plan,) = plans_of_slices(step, header, np.random.default_rng(0), 3)
    assert plan.num_replicas > 0
    # The expectations are those of a sample, here of all instances.
    per_instance = plan.num_replicas / plan.mixed_ML.size
    assert header.slices.replicas == pytest.approx(per_instance, rel=0.3)
    assert header.slices.max_vio < header.max_vio_before


def test_limits_of_rows_need_the_whole_plan() -> None:
    step = steady_step(0)

    limited = replace(step.settings, max_rows_per_rank=10**9)
    assert step.plan(sliced=True, settings=limited).slices is None


@given(st.integers(0, 100), st.integers(1, 20), st.integers(0, 50))
def test_every_micro_step_and_layer_is_planned_once(num_micro_steps: int, num_ranks: int, num_layers: int) -> None:
    assert [m for micro_steps in rounds_of(num_micro_steps) for m in micro_steps] == list(range(num_micro_steps))
    assert [len(micro_steps) for micro_steps in rounds_of(num_micro_steps)][:1] in ([], [1])
    layers = [layer for rank in range(num_ranks) for layer in layers_of_rank(num_layers, rank, num_ranks)]
    assert layers == list(range(num_layers))


def test_the_hash_of_a_header_follows_its_rules() -> None:
    """Headers of the same schedule and homes differ, if their slices would."""
    step = steady_step(0)
    plans = [step.plan(sliced=True, cluster=replace(step.cluster, node_bytes_per_s=rate)) for rate in (1e9, 2e9)]
    first, second = (made.plans[0] for made in plans)
    assert plans[0].slices is not None
    assert np.array_equal(first.home, second.home)
    assert plans[0].slices.digest != plans[1].slices.digest
    assert first.hash != second.hash
