"""Transfers: memory, dtypes, paths, and plans that are refused before any work."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.moe_model import ALL_LISTS
from helpers.planned_steps import SHAPE, Step, make
from helpers.random_plans import random_plan, random_schedule, random_trace
from helpers.rank_tests import runs_on_ranks
from trimtab.array_type import Array
from trimtab.cluster import load_cluster
from trimtab.errors import InputError, RanksDisagreeError
from trimtab.planner import Placement, Schedule
from trimtab.planner.replicas.paths import HOST, PEER
from trimtab.shared_files import SHARED_MEMORY
from trimtab.trace import RoutingTrace

LISTED = replace(SHAPE, lists=ALL_LISTS)


@runs_on_ranks()
def test_memory_does_not_grow_with_depth() -> None:
    """The pool does not grow with depth, host memory is limited, and its file is unlinked."""
    for layers in (4, 16):
        shape = replace(SHAPE, layers=layers)
        session, model, _ = make(shape=shape, slots_per_rank=2)
        step = Step(0, shape=shape)
        report = step.apply(session)
        step.run(session, model)
        expert_bytes = session.homes[0].expert_bytes
        ring, returns = session.transfers.ring, session.transfers.returns
        places = session.settings.ring_layers
        assert ring.nbytes == places * session.slots_per_rank * expert_bytes
        most = np.unique(step.plan.mirror_entries(0), axis=0)
        assert report.memory.mirror_bytes == len(most) * expert_bytes > 0
        most_slots = places * session.slots_per_rank * (1 + session.num_ranks)
        assert report.memory.pool_bytes <= most_slots * expert_bytes
        assert returns.nbytes <= places * session.num_ranks * session.slots_per_rank * expert_bytes
        session.close()
    dist.barrier()
    assert not list(SHARED_MEMORY.glob(f"trimtab-{os.getpid()}-*"))


@runs_on_ranks()
def test_slots_are_allocated_again_after_memory_ran_out() -> None:
    session, model, _ = make(slots_per_rank=2)
    step, zeros, slots = Step(0), torch.zeros, 0

    def zeros_until_full(*shape: Any, **options: Any) -> torch.Tensor:
        nonlocal slots
        slots += shape == (2, *session.homes[0].expert_shapes[0])
        if slots == 2:
            raise MemoryError("no memory for slots")
        return zeros(*shape, **options)

    with mock.patch.object(torch, "zeros", zeros_until_full), pytest.raises(MemoryError, match="for slots"):
        step.apply(session)
    step.apply(session)
    step.run(session, model)


def large_step() -> tuple[RoutingTrace, Schedule]:
    """A step for which replicas pay."""
    rng = np.random.default_rng(1)
    trace = random_trace(rng, num_sequences=16, max_length=1500, num_layers=4, num_experts=8, top_k=2)
    return trace, random_schedule(rng, 16, num_ranks=2, num_micro_steps=2)


@runs_on_ranks()
def test_paths_can_be_chosen() -> None:
    """With one path all replicas use it; with both none uses host memory that is slow."""
    trace, schedule = large_step()
    usual = load_cluster("local-cpu", ranks=2)
    slow_host = replace(usual, host_bytes_per_s=usual.node_bytes_per_s / 100)
    for paths, rates, path in (("peer", usual, PEER), ("host", usual, HOST), ("both", slow_host, PEER)):
        session, _, _ = make(paths=paths, rates=rates)
        mine = trace.select(schedule.sequences_of(session.rank))
        report = session.plan(mine, schedule)
        assert report.replicas > 0
        used = set(session.step_plan.replica_paths.tolist())
        assert used == {path}
        assert (report.memory.mirror_bytes > 0) == (HOST in used)
    with pytest.raises(InputError, match="some replicas have no path"):
        make(paths="host", mirror_bytes=10)[0].plan(mine, schedule)
    session = make(mirror_bytes=10)[0]
    session.plan(mine, schedule)
    assert session.transfers.ring.mirror.nbytes == 0


@runs_on_ranks()
def test_bytes_are_those_of_the_plan() -> None:
    """With a place for every layer each replica comes once and its gradient leaves once, on two nodes."""
    session, model, _ = make(ranks_per_node=1, ring_layers=SHAPE.layers)
    step, rank, num_ranks = Step(4), session.rank, session.num_ranks
    plan = random_plan(step.rng, step.workload, step.schedule, slots=2, ranks_per_node=1)
    step.apply(session, plan)
    session.take_metrics()
    step.run(session, model)
    metrics = session.take_metrics()
    # Gate, up and down, in float32.
    expert_bytes = 3 * SHAPE.hidden * SHAPE.width * 4
    expected = dict.fromkeys(("peer", "host", "gradient"), 0)
    mirrored = set()
    for m in range(plan.num_micro_steps):
        for layer in range(SHAPE.layers):
            for p in plan.replicas_of(m, layer):
                expert, of_replica = int(plan.replica_experts[p]), int(plan.replica_ranks[p])
                home = expert * num_ranks // SHAPE.experts
                if plan.replica_paths[p] == HOST:
                    expected["host"] += of_replica == rank
                    mirrored.add((of_replica, layer, expert, home))
                else:
                    expected["peer"] += home == rank
                expected["gradient"] += of_replica == rank
    # Once a step, to each other node that has replicas of the expert.
    expected["mirror"] = sum(home == rank for _, _, _, home in mirrored)
    assert len(set(expected.values())) > 2
    for kind, count in expected.items():
        assert metrics[f"transfer/{kind}_bytes"] == count * expert_bytes > 0, kind
    assert metrics["transfer/moved_bytes"] == 0
    assert not any(session.take_metrics().values())


@runs_on_ranks()
def test_report_has_the_figures_of_the_plan() -> None:
    """Figures of a report, from loops over the routes and the plan's quotas."""
    session, model, _ = make()
    session.register_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    step = Step(6)
    report = step.apply(session)
    plan, trace, schedule = step.plan, step.trace, step.schedule
    before_MLR, after_MLR = np.zeros((2, schedule.num_micro_steps, SHAPE.layers, session.num_ranks), np.int64)
    for s, m in enumerate(schedule.micro_step):
        for ids_LK in trace.expert_ids[trace.sequence_starts[s] : trace.sequence_starts[s + 1]]:
            for layer, ids_K in enumerate(ids_LK):
                for expert in ids_K:
                    before_MLR[m, layer, int(expert) * session.num_ranks // SHAPE.experts] += 1
                    after_MLR[m, layer, plan.home[layer, expert]] += 1
    for m in range(schedule.num_micro_steps):
        for layer in range(SHAPE.layers):
            for p in plan.replicas_of(m, layer):
                rows = plan.quota_tokens[plan.quota_starts[p] : plan.quota_starts[p + 1]].sum()
                after_MLR[m, layer, plan.home[layer, plan.replica_experts[p]]] -= rows
                after_MLR[m, layer, plan.replica_ranks[p]] += rows

    def max_vio(loads_MLR: Array) -> float:
        return float(np.mean(loads_MLR.max(axis=2) / loads_MLR.mean(axis=2)) - 1)

    assert report.max_vio_before == pytest.approx(max_vio(before_MLR))
    assert report.max_vio_after == pytest.approx(max_vio(after_MLR))
    assert (report.peak_rows_before, report.peak_rows_after) == (before_MLR.max(), after_MLR.max())
    assert report.max_vio_before != pytest.approx(report.max_vio_after)
    assert np.array_equal(session.rank_loads, after_MLR)
    assert report.replicas == len(plan.replica_experts) > 0
    assert (report.micro_steps, report.unplanned_micro_steps) == (2, 0)


@runs_on_ranks()
def test_plan_that_saves_too_little_is_not_executed() -> None:
    """A plan with a smaller saving than `least_gain` is not executed: no replicas."""
    trace, schedule = large_step()
    gain, executed = 0.0, []
    for factor in (0.0, 0.7, 1.3):
        session, model, _ = make(least_gain=factor * gain)
        session.register_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        report = session.plan(trace.select(schedule.sequences_of(session.rank)), schedule)
        gain = gain or report.predicted_gain
        executed.append(report.replicas > 0)
        assert (report.max_vio_after < report.max_vio_before) == executed[-1]
        assert (report.peak_rows_after < report.peak_rows_before) == executed[-1]
        assert report.unplanned_micro_steps == 0
    assert executed == [True, True, False]


@runs_on_ranks()
def test_invalid_plans_are_refused_before_any_work() -> None:
    session, model, _ = make(slots_per_rank=2)
    step = Step(1)
    home_LE = step.plan.home.copy()
    home_LE[1, [0, -1]] = home_LE[1, [-1, 0]]
    moving = random_plan(step.rng, step.workload, step.schedule, slots=2, placement=Placement(home_LE))
    with pytest.raises(InputError, match=r"the plan has other homes for 2 experts .* only by renumber"):
        step.apply(session, moving)
    other = replace(step.plan, settings=f"rank {session.rank}")
    with pytest.raises(RanksDisagreeError, match=r"apply_plan\(\): the plan is '\w+' on rank 0 and '\w+' on rank 1"):
        step.apply(session, other)
    assert np.array_equal(session.placement.home, Placement.contiguous(4, 8, 2).home)
    step.apply(session)
    step.run(session, model)
    with pytest.raises(InputError, match="slots a rank; this session has 2"):
        Step(1, slots=3).apply(session)
