"""Slices of a step, made in any order, are the replicas of the plan that is made in one piece."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from helpers.examples import examples
from helpers.planner_steps import Step, steady_step, steps
from trimtab.cluster import ClusterSpec
from trimtab.planner import PlannedStep, PlanSettings, StepPlan, Workload
from trimtab.planner.plan.slices import SlicePlanner, from_bytes, layers_of_rank, rounds_of, to_bytes
from trimtab.planner.replicas.paths import choose_given_mirrors, choose_paths, links_of
from trimtab.planner.replicas.replica_table import ReplicaTable


def plans_of_slices(step: Step, header: PlannedStep, rng: np.random.Generator, planning_ranks: int) -> list[StepPlan]:
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


@settings(max_examples=examples(short=60, long=600))
@given(steps(), st.integers(0, 2**32), st.integers(1, 5))
def test_slices_are_the_replicas_of_the_whole_plan(step: Step, seed: int, planning_ranks: int) -> None:
    header, whole = step.plan(sliced=True), step.plan()
    assert all(plan.num_replicas == 0 for plan in header.plans) or header.slices is None
    if header.slices is None:
        return
    made = plans_of_slices(step, header, np.random.default_rng(seed), planning_ranks)
    for plan, workload in zip(made, step.workloads(header.schedule), strict=True):
        plan.check(workload)
    places, same_places = (np.stack([plan.schedule.micro_step, plan.schedule.rank]) for plan in (header, whole))
    if whole.chosen_strategy == header.chosen_strategy and np.array_equal(places, same_places):
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
    first, second = plans
    assert np.array_equal(first.placement.home, second.placement.home)
    assert first.slices is not None
    assert second.slices is not None
    assert first.slices.digest != second.slices.digest
    assert first.plans[0].hash != second.plans[0].hash


def test_unknown_routes_count_where_they_are_expected() -> None:
    """The hot expert's home has expected rows beside the known ones, and keeps fewer of these."""
    counts_MLRE = np.zeros((1, 1, 2, 4), np.int32)
    counts_MLRE[..., 0], counts_MLRE[..., 2] = 1000, 200
    unknown_MLR = np.full((1, 1, 2), 300, np.int32)
    home_LE, cluster = np.array([[0, 0, 1, 1]], np.int16), ClusterSpec(2, 2, 2)
    limits = PlanSettings(1.0, 1).limits(cluster)
    kept = []
    for workload in (Workload.known(counts_MLRE), Workload(counts_MLRE, unknown_MLR)):
        nothing = np.zeros((1, 1, 4), bool)
        (table,) = SlicePlanner(workload, home_LE, limits, links_of(cluster), nothing).plan(range(1), range(1))
        kept.append(2000 - int(table.shares.tokens[table.experts == 0].sum()))
    assert kept[1] < kept[0]


@settings(max_examples=50)
@given(st.integers(0, 2**32))
def test_weights_come_from_mirrors_that_hold_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cluster = ClusterSpec(4, 2, 3)
    counts_MLRE = rng.multinomial(400, rng.dirichlet(np.full(16, 0.3)), (3, 2, 4)).astype(np.int32)
    home_LE = np.stack([rng.permuted(np.repeat(np.arange(4), 4)) for _ in range(2)]).astype(np.int16)
    mirrored_NLE = rng.random((2, 2, 16)) < 0.5
    limits = PlanSettings(1.0, 1).limits(cluster)
    planner = SlicePlanner(Workload.known(counts_MLRE), home_LE, limits, links_of(cluster), mirrored_NLE)
    table = ReplicaTable.join_layers(planner.plan(range(3), range(2)))
    paths_P = planner.paths(table)
    held_P = mirrored_NLE[table.ranks // 2, table.instances_P % 2, table.experts]
    assert not paths_P[~held_P].any()
    everything = choose_given_mirrors(home_LE, table, links_of(cluster), np.ones_like(mirrored_NLE))
    assert np.array_equal(everything, choose_paths(home_LE, table, cluster))
