"""Sessions: equal gradients of two schedules, limits of rows, errors of wrong use."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.moe_model import Shape, TinyMoE
from helpers.planned_steps import make, rows_of
from helpers.random_plans import random_schedule, random_trace
from helpers.rank_tests import runs_on_ranks
from trimtab.cluster import ClusterSpec, ModelSpec, StepCosts
from trimtab.errors import InputError
from trimtab.planner import Schedule, Workload, plan_schedule
from trimtab.runtime import Session
from trimtab.runtime.ranks.process_groups import BACKGROUND_CTAS, destroy_groups, group_of
from trimtab.runtime.step_planner import LOCAL_CPU, default_rates
from trimtab.trace import RoutingTrace

SHAPE = Shape(layers=2, experts=8, top_k=2, hidden=8, width=6)


def make_trace(seed: int, num_sequences: int = 8) -> RoutingTrace:
    return random_trace(
        np.random.default_rng(seed), num_sequences=num_sequences, max_length=1000, num_layers=2, num_experts=8, top_k=2
    )


def run_step(session: Session, model: TinyMoE, trace: RoutingTrace, schedule: Schedule) -> None:
    """One update over a whole step."""
    for index in range(schedule.num_micro_steps):
        mine = np.flatnonzero((schedule.rank == session.rank) & (schedule.micro_step == index))
        with session.micro_step(index, sequence_hashes=trace.sequence_hashes[mine]):
            model(torch.zeros(len(rows_of(trace, mine)), dtype=torch.int64)).sum().backward()
    session.finish_gradients(model.replicated())
    model.zero_grad()


def make_session(**options: Any) -> tuple[Session, TinyMoE]:
    session, model, _ = make(torch.float64, shape=SHAPE, **options)
    return session, model


def plan_own(session: Session, trace: RoutingTrace, schedule: Schedule) -> int:
    return session.plan(trace.select(schedule.sequences_of(session.rank)), schedule).replicas


@runs_on_ranks()
def test_row_limits_are_kept_or_refused() -> None:
    trace = make_trace(5)
    schedule = random_schedule(np.random.default_rng(1), 8, num_ranks=2, num_micro_steps=3)
    for limits in ({"exact": True}, {"max_rows_per_rank": 2200}):
        session, model = make_session(slots_per_rank=4, **limits)
        plan_own(session, trace, schedule)
        loads_MLR = session.step_plan.rank_loads(Workload.from_trace(trace, schedule))
        even_ML = -(-loads_MLR.sum(axis=2) // 2)
        most_ML = even_ML if "exact" in limits else np.full_like(even_ML, 2200)
        assert (loads_MLR.max(axis=2) <= most_ML).all()
        run_step(session, model, trace, schedule)
    # Refused on every rank, before the step.
    session, _ = make_session(max_rows_per_rank=10)
    with pytest.raises(InputError, match=r"max_rows_per_rank=10 can't be kept: .* can be kept with"):
        plan_own(session, trace, schedule)
    unknown = replace(trace, expert_ids=np.full_like(trace.expert_ids, trace.no_route))
    session, _ = make_session(max_rows_per_rank=100_000)
    with pytest.raises(InputError, match="record all routes"):
        plan_own(session, unknown, schedule)


@runs_on_ranks()
def test_errors_name_wrong_use() -> None:
    session, _ = make_session()
    trace, schedule = make_trace(3), random_schedule(np.random.default_rng(0), 8, num_ranks=2, num_micro_steps=1)
    with pytest.raises(RuntimeError, match="needs a planned step"), session.micro_step(0):
        pass
    wrong = random_trace(np.random.default_rng(0), num_sequences=8, max_length=5, num_layers=3, num_experts=8, top_k=2)
    with pytest.raises(InputError, match="the trace has 3 MoE layers, 8 experts, top-2; the model has 2 MoE layers"):
        plan_own(session, wrong, schedule)
    with pytest.raises(InputError, match="this rank's trace 0 sequences"):
        session.plan(trace.select([]), schedule)
    plan_own(session, trace, schedule)
    with session.micro_step(0), pytest.raises(RuntimeError, match="the micro-step was planned with"):
        session.layers[0].route(torch.zeros(1, 2, dtype=torch.int64))
    with session.micro_step(0), pytest.raises(RuntimeError, match="renumber can't begin while micro-step 0"):
        session.renumber()


@runs_on_ranks()
def test_the_planner_gets_load_lengths_and_costs_of_the_whole_step() -> None:
    session, _ = make_session()
    trace, schedule = make_trace(3), random_schedule(np.random.default_rng(0), 8, num_ranks=2, num_micro_steps=2)
    trace.expert_ids[::5] = trace.no_route
    seen: list[Any] = []

    def plan(*inputs: Any, **settings: Any) -> Any:
        loads = inputs[0]
        seen.append((*loads.lengths_G, *loads.count(np.arange(2), np.arange(SHAPE.layers)), settings["costs"]))
        return plan_schedule(*inputs, **settings)

    with mock.patch("trimtab.runtime.step_planner.plan_schedule", plan):
        plan_own(session, trace, schedule)
    # The first rank plans.
    assert len(seen) == (session.rank == 0)
    for lengths, load, costs in seen:
        expected = Workload.from_trace(trace, schedule)
        assert lengths.tolist() == trace.sequence_lengths.tolist()
        assert np.array_equal(load.token_counts_MLRE, expected.token_counts_MLRE)
        assert np.array_equal(load.unknown_MLR, expected.unknown_MLR)
        cluster = replace(LOCAL_CPU, ranks=2, ranks_per_node=2, slots_per_rank=session.slots_per_rank)
        model = ModelSpec("", 8, 2, hidden_size=SHAPE.hidden, expert_width=SHAPE.width, weight_bytes=8)
        assert costs == StepCosts.of(cluster, model, moe_layers=SHAPE.layers, ring_layers=session.settings.ring_layers)


@runs_on_ranks()
def test_seconds_of_metrics_and_reports_are_within_those_that_passed() -> None:
    session, model = make_session()
    for _ in range(2):
        assert not any(session.take_metrics().values())
    trace, schedule = make_trace(3), random_schedule(np.random.default_rng(0), 8, num_ranks=2, num_micro_steps=2)
    mine, first = trace.select(schedule.sequences_of(session.rank)), time.perf_counter()
    for _ in range(2):
        start = time.perf_counter()
        report = session.plan(mine, schedule)
        planned_s = time.perf_counter() - start
        run_step(session, model, trace, schedule)
        metrics = session.take_metrics()
        assert 0 < report.planning_s <= report.waited_s <= planned_s
        passed_s = time.perf_counter() - first
        seconds = {name: value for name, value in metrics.items() if name.endswith("_s") and "predicted" not in name}
        assert {"transfer/exposed_s", "transfer/refresh_s", "transfer/cpu_s", "plan/waited_s"} <= seconds.keys()
        assert all(0 <= value <= passed_s for value in seconds.values()), (seconds, passed_s)
    assert metrics["plan/measured_s"] > 0


@runs_on_ranks()
def test_groups_are_not_split_from_a_communicator_that_others_would_have_to_join() -> None:
    world = dist.group.WORLD
    assert world is not None
    destroy_groups([])
    with pytest.MonkeyPatch.context() as patch:
        # As `init_process_group(device_id=)` leaves it; torch then asks for a communicator to split.
        patch.setattr(world, "bound_device_id", torch.device("cuda:0"))
        patch.setattr(dist.distributed_c10d, "_get_split_source", lambda _group: pytest.fail("split"))
        Session(num_experts=8).close()
        assert world.bound_device_id == torch.device("cuda:0")


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs torch with NCCL")
@runs_on_ranks()
def test_messages_during_compute_take_few_multiprocessors_at_once() -> None:
    options: dict[str, Any] = {}

    def stop(*_: object, backend_options: Any, group_desc: str, **__: object) -> None:
        options[group_desc] = backend_options
        raise NotImplementedError

    with pytest.MonkeyPatch.context() as patch:
        # NCCL creates groups on GPUs only.
        patch.setattr(dist.distributed_c10d, "_new_process_group_helper", stop)
        for use in ("experts", "weights", "gradients"):
            with pytest.raises(NotImplementedError):
                group_of([dist.get_rank()], use, backend="nccl", timeout=timedelta(seconds=7))
    assert options.pop("trimtab experts") is None
    for each in options.values():
        assert each.is_high_priority_stream
        assert each.config.max_ctas == BACKGROUND_CTAS
        assert each._timeout == timedelta(seconds=7)


def test_rates_that_are_assumed_on_a_gpu_are_those_of_an_h100_cluster() -> None:
    rates = default_rates(torch.device("cuda"))
    assert replace(rates, ranks=16, ranks_per_node=8) == ClusterSpec(16, 8)
