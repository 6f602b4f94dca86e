"""Transfers: memory, dtypes, paths, and plans that are refused before any work."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.equality import relative_error
from helpers.moe_model import ALL_LISTS, Shape, matches
from helpers.planned_steps import SHAPE, Step, make, rows_of
from helpers.random_plans import random_plan, random_schedule, random_trace
from helpers.rank_pool import on_ranks
from helpers.rank_tests import runs_on_ranks
from trimtab.array_type import Array
from trimtab.cluster import load_cluster
from trimtab.errors import InputError, RanksDisagreeError
from trimtab.planner import Placement, Schedule
from trimtab.planner.replicas.paths import HOST, PEER
from trimtab.runtime.step_planner import LOCAL_CPU
from trimtab.shared_files import SHARED_MEMORY
from trimtab.trace import RoutingTrace

LISTED = replace(SHAPE, lists=ALL_LISTS)


@pytest.mark.parametrize("shape", [SHAPE, LISTED])
@runs_on_ranks()
def test_low_precision_stays_near_float32(shape: Shape) -> None:
    """bf16 parameters, and float32 parameters with bf16 compute, are near float32 over optimizer steps and moves."""
    for dtype, compute_dtype in ((torch.bfloat16, None), (torch.float32, torch.bfloat16)):
        session, model, reference = make(dtype, compute_dtype, shape)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (reference, model)]
        session.register_optimizers(optimizers[1])
        for seed in range(3):
            step = Step(seed)
            step.apply(session)
            expected = step.reference_loss(reference)
            expected.backward()
            loss = step.run(session, model)
            assert relative_error(loss, expected.detach()) < 0.02, (dtype, compute_dtype, seed)
            assert all(layer.homes.sources[0][0].dtype is torch.bfloat16 for layer in session.layers)
            for name, parameter, whole, mine in matches(model, reference):
                if name.startswith("blocks") and "router" not in name:
                    assert parameter.grad is not None
                    assert parameter.grad.dtype is dtype
                    assert whole.grad is not None
                    error = relative_error(parameter.grad.float(), whole.grad[mine])
                    assert error < (0.1 if shape.lists else 0.06), (dtype, compute_dtype, seed)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        # Outside micro-steps layers use the parameters, not staging memory.
        tokens = torch.arange(SHAPE.vocab)
        for block in reference.moe_blocks():
            block.recorded_ids = None
        before = model(tokens)
        with torch.no_grad():
            for parameter in session.layers[0].parameters:
                parameter.zero_()
        session.weights_changed()
        assert relative_error(model(tokens).float(), before.float()) > 0.01


@pytest.mark.parametrize("shape", [SHAPE, LISTED])
@runs_on_ranks()
def test_frozen_experts_are_replicated_without_gradients(shape: Shape) -> None:
    """With some or all expert tensors frozen, the other gradients do not change."""
    for frozen in (("gate_up",), ("down",), ("gate_up", "down")):
        session, model, reference = make(shape=shape)
        for m in (model, reference):
            for block in m.moe_blocks():
                for name in frozen:
                    getattr(block, name).requires_grad_(False)
        step = Step(3, moves=False)
        assert step.plan.num_replicas > 0
        step.apply(session)
        step.reference_loss(reference).backward()
        step.run(session, model)
        for name, parameter, whole, mine in matches(model, reference):
            if not whole.requires_grad:
                assert parameter.grad is None, name
                continue
            assert parameter.grad is not None, name
            assert whole.grad is not None
            assert relative_error(parameter.grad, whole.grad[mine]) < 1e-5, (frozen, name)


@runs_on_ranks()
def test_memory_does_not_grow_with_depth() -> None:
    """The pool does not grow with depth, host memory is limited, and its file is unlinked."""
    pools = []
    for layers in (4, 16):
        shape = replace(SHAPE, layers=layers)
        session, model, _ = make(shape=shape)
        step = Step(0, shape=shape, moves=False)
        report = step.apply(session)
        step.run(session, model)
        pools.append(report.memory.pool_bytes)
        expert_bytes = session.homes[0].expert_bytes
        ring, returns = session.transfers.ring, session.transfers.returns
        places = session.settings.ring_layers
        assert ring.nbytes == places * session.slots_per_rank * expert_bytes
        most = np.unique(step.plan.mirror_entries(0), axis=0)
        assert report.mirror_bytes == report.memory.mirror_bytes == len(most) * expert_bytes > 0
        assert returns.nbytes <= places * session.num_ranks * session.slots_per_rank * expert_bytes
        session.close()
    assert pools[0] == pools[1]
    dist.barrier()
    assert not list(SHARED_MEMORY.glob(f"trimtab-{os.getpid()}-*"))


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
    step, rank, num_ranks = Step(4, moves=False), session.rank, session.num_ranks
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
    contiguous = np.arange(SHAPE.experts) * session.num_ranks // SHAPE.experts
    assert report.homes_moved == np.count_nonzero(plan.home != contiguous) > 0
    assert report.replicas == len(plan.replica_experts) > 0
    assert (report.micro_steps, report.unplanned_micro_steps) == (2, 0)


@runs_on_ranks()
def test_plan_that_saves_too_little_is_not_executed() -> None:
    """A plan with a smaller saving than `least_gain` is not executed: no replicas and no moves."""
    trace, schedule = large_step()
    gain, executed = 0.0, []
    for factor in (0.0, 0.7, 1.3):
        session, model, _ = make(least_gain=factor * gain)
        session.register_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        report = session.plan(trace.select(schedule.sequences_of(session.rank)), schedule)
        gain = gain or report.predicted_gain
        executed.append(report.replicas + report.homes_moved > 0)
        assert (report.max_vio_after < report.max_vio_before) == executed[-1]
        assert (report.peak_rows_after < report.peak_rows_before) == executed[-1]
        assert report.unplanned_micro_steps == 0
    assert executed == [True, True, False]


@runs_on_ranks()
def test_invalid_plans_are_refused_before_any_work() -> None:
    session, model, _ = make()
    step = Step(1)
    with pytest.raises(InputError, match=r"the plan moves \d+ experts .* register_optimizers"):
        step.apply(session)
    session.register_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    other = replace(step.plan, settings=f"rank {session.rank}")
    with pytest.raises(RanksDisagreeError, match=r"apply_plan\(\): the plan is '\w+' on rank 0 and '\w+' on rank 1"):
        step.apply(session, other)
    assert np.array_equal(session.placement.home, Placement.contiguous(4, 8, 2).home)
    step.apply(session)
    assert np.array_equal(session.placement.home, step.plan.home)
    step.run(session, model)
    with pytest.raises(RuntimeError, match="gradients that wait for an optimizer step"):
        Step(2).apply(session)
    with pytest.raises(InputError, match="slots a rank; this session has 2"):
        Step(1, slots=3).apply(session)


def plan_own_schedules(groups: int) -> None:
    """Planned schedules, homes and replicas give the plain model's gradient, with one and several groups."""
    # With rates, no step does nothing to measure that.
    session, model, reference = make(groups=groups, rates=LOCAL_CPU)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=0.1) for m in (reference, model)]
    session.register_optimizers(optimizers[1])
    data_rank, num_data_ranks = dist.get_rank(), dist.get_world_size()
    of_rank, mini_batch = np.arange(24) * num_data_ranks // 24, np.arange(24) % 2
    for seed in range(3):
        rng = np.random.default_rng(seed)
        trace = random_trace(rng, num_sequences=24, max_length=600, num_layers=4, num_experts=8, top_k=2)
        planned = session.plan_sequences(
            trace.select(np.flatnonzero(of_rank == data_rank)), token_budget=1200, mini_batch=mini_batch
        )
        schedule = planned.schedule
        assert np.array_equal(schedule.mini_batch_of_micro_step[schedule.micro_step], mini_batch)
        report = session.apply_plan(planned, trace.select(schedule.sequences_of(data_rank)))
        assert report.max_vio_after < report.max_vio_before
        step = Step(0)
        step.trace = trace
        step.tokens, step.labels = torch.from_numpy(rng.integers(0, 11, (2, trace.num_tokens)))
        for batch in range(2):
            # Several optimizer steps with one plan.
            for index in schedule.micro_steps_of(batch):
                mine = np.flatnonzero((schedule.rank == data_rank) & (schedule.micro_step == index))
                with session.micro_step(int(index)):
                    step.loss(model, rows_of(trace, mine)).backward()
            session.finish_gradients(model.replicated())
            members = rows_of(trace, np.flatnonzero(mini_batch == batch))
            for layer, block in enumerate(reference.moe_blocks()):
                block.recorded_ids = torch.from_numpy(trace.expert_ids[members.numpy(), layer].astype(np.int64))
            step.loss(reference, members).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        state = session.logical_state_dict(model)
        for name, expected in reference.state_dict().items():
            assert relative_error(state[name], expected) < 1e-4, (seed, name)


@pytest.mark.parametrize(("ranks", "groups"), [(4, 2), pytest.param(2, 1, marks=pytest.mark.nightly)])
def test_planned_schedules_train_as_the_plain_model(ranks: int, groups: int) -> None:
    on_ranks(plan_own_schedules, (groups,), ranks=ranks)
