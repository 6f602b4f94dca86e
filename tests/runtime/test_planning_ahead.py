"""Sequences that are counted while others generate give the plans of a step that is counted at once."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.moe_model import Shape, TinyMoE
from helpers.planner_steps import free_replicas, skewed_trace
from helpers.rank_pool import on_ranks
from trimtab.errors import InputError
from trimtab.planner import GroupPlans, Placement, SequenceCounts
from trimtab.runtime import PlannedStep, Session, planning
from trimtab.runtime.planning import SessionPlanner
from trimtab.runtime.planning_ahead import EarlyPlan
from trimtab.trace import RoutingTrace

LAYERS, EXPERTS, TOP_K, BUDGET = 2, 8, 2, 300
MAKE = SessionPlanner.of


def make_planner(*args: Any, **options: Any) -> SessionPlanner:
    """A planner for which replicas cost nothing."""
    made = MAKE(*args, **options)
    return replace(made, costs=free_replicas(made.cluster))


def make_session(**options: Any) -> Session:
    torch.manual_seed(0)
    session = Session(num_experts=EXPERTS, slots_per_rank=2, **options)
    TinyMoE(Shape(layers=LAYERS, experts=EXPERTS, top_k=TOP_K, hidden=8, width=8), torch.float64).share(session)
    return session


def rank_trace(count: int = 20) -> RoutingTrace:
    """Sequences of this rank."""
    rng = np.random.default_rng((3, dist.get_rank()))
    trace = skewed_trace(rng, sequences=count, layers=LAYERS, experts=EXPERTS, top_k=TOP_K, max_length=60)
    # A response occurs twice.
    trace = replace(trace, sequence_hashes=rng.integers(1, 1 << 60, trace.num_sequences).astype(np.uint64))
    return trace.select([*range(count), 3])


def plan(session: Session, trace: RoutingTrace, parts: list[np.ndarray]) -> PlannedStep:
    """The plan of a step of which some parts are counted ahead."""
    for part in parts:
        session.plan_ahead(trace.select(part), token_budget=BUDGET)
    return session.plan_sequences(trace, token_budget=BUDGET)


def plan_in_orders() -> None:
    trace = rank_trace()
    with mock.patch.object(SessionPlanner, "of", make_planner):
        session = make_session()
        at_once = plan(session, trace, [])
        assert at_once.slices is not None
        assert (at_once.known_ahead, at_once.ahead_s) == (0.0, 0.0)
        plans = []
        for seed in range(3):
            order = np.random.default_rng((seed, dist.get_rank())).permutation(trace.num_sequences)
            cuts = np.sort(np.random.default_rng((9, seed, dist.get_rank())).integers(0, trace.num_sequences, 2))
            ahead = plan(session, trace, np.split(order, cuts))
            assert ahead.known_ahead > 0.8
            assert ahead.ahead_s > 0
            assert ahead.planning_s > 0
            assert np.array_equal(ahead.schedule.micro_step, at_once.schedule.micro_step)
            assert np.array_equal(ahead.schedule.rank, at_once.schedule.rank)
            plans.append(ahead.plan.hash)
        assert len(set(plans)) == 1
        # Sequences that are not trained are counted, but have no place in the schedule.
        more = RoutingTrace.concatenate([trace, replace(trace, sequence_hashes=trace.sequence_hashes + 1)])
        session.plan_ahead(more, token_budget=BUDGET)
        assert len(session.plan_sequences(trace, token_budget=BUDGET).schedule.rank) == 2 * trace.num_sequences
        # Of a small part, homes and strategy are not chosen.
        assert plan(session, trace, [np.arange(7)]).known_ahead == 0.0
        # The next step is counted anew.
        assert plan(session, trace, []).ahead_s == 0.0
        session.close()


def test_any_order_of_finished_sequences_gives_the_same_plan() -> None:
    on_ranks(plan_in_orders, ranks=2)


def compare_figures() -> None:
    """Metrics of slices are those of the whole plan, which is valid."""
    trace = rank_trace()
    with mock.patch.object(SessionPlanner, "of", make_planner):
        session = make_session()
        planned = plan(session, trace, [np.arange(10)])
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, trace)
        mine = RoutingTrace.concatenate(parts).select(planned.schedule.sequences_of(dist.get_rank()))
        report = session.apply_plan(planned, mine)
        assert report.is_sliced
        assert report.waited_s >= report.planning_s > 0
        whole = session.step_plan
        metrics = session.take_metrics()
        loads = session.rank_loads
        assert whole.num_replicas > 0
        assert metrics["moe/planned_replicas"] == whole.num_replicas
        max_vio = float((loads.max(axis=2) * loads.shape[2] / loads.sum(axis=2) - 1).mean())
        assert metrics["moe/planned_max_vio"] == pytest.approx(max_vio, abs=1e-5)
        assert metrics["moe/max_vio_error"] == pytest.approx(max_vio - report.max_vio_after, abs=1e-5)
        # Its slices are planned already.
        session.apply_plan(replace(planned, plan=whole, slices=None), mine)
        assert np.array_equal(session.rank_loads, loads)
        session.close()


def test_figures_of_slices_are_those_of_the_whole_plan() -> None:
    on_ranks(compare_figures, ranks=2)


def count_once() -> list[int]:
    """Sequences that are counted when the step is planned."""
    trace = rank_trace()
    session = make_session()
    counted = []
    plain = SequenceCounts.from_trace

    def count(given: RoutingTrace) -> SequenceCounts:
        counted.append(given.num_sequences)
        return plain(given)

    with mock.patch.object(SequenceCounts, "from_trace", count):
        plan(session, trace, [np.arange(5), np.arange(15)])
    session.close()
    return counted


def test_sequences_are_counted_once() -> None:
    for counted in on_ranks(count_once, ranks=2):
        assert counted == [5, 10, 5]


def fail_ahead() -> list[str]:
    trace = rank_trace()
    session = make_session()
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trimtab").addHandler(handler)
    with mock.patch.object(SessionPlanner, "plan_ahead", side_effect=MemoryError("no memory")):
        planned = plan(session, trace, [np.arange(15)])
    logging.getLogger("trimtab").removeHandler(handler)
    assert len(planned.schedule.rank) == 2 * trace.num_sequences
    assert planned.known_ahead == 0.0
    # A rank's error is its own; the others plan.
    if dist.get_rank() == 1:
        with pytest.raises(InputError, match="needs sequence_hashes of all sequences"):
            session.plan_ahead(replace(trace, sequence_hashes=trace.sequence_hashes * 0), token_budget=BUDGET)
    else:
        session.plan_ahead(trace, token_budget=BUDGET)
    planned = session.plan_sequences(trace, token_budget=BUDGET)
    assert planned.known_ahead == pytest.approx(0.5, abs=0.2) or planned.known_ahead == 0.0
    session.close()
    return warnings


def test_a_failure_ahead_is_told_and_the_step_is_planned_at_once() -> None:
    first, second = on_ranks(fail_ahead, ranks=2)
    assert first == ["planning ahead failed, the step is planned at once: no memory"]
    assert second == []


def report() -> None:
    trace = rank_trace()
    with mock.patch.object(SessionPlanner, "of", make_planner):
        session = make_session(max_rows_per_rank=10**6)
        session.plan_ahead(trace, token_budget=BUDGET)
        planned = session.plan_sequences(trace, token_budget=BUDGET)
        # Rows are limited in whole plans only.
        assert planned.slices is None
        assert planned.known_ahead == 0.0
        session.close()


def test_limits_of_rows_are_planned_at_once() -> None:
    on_ranks(report, ranks=2)
    assert planning.KNOWN_AHEAD == 0.5


def test_homes_are_chosen_again_if_less_than_half_was_known() -> None:
    plans, here = cast(GroupPlans, object()), Placement(np.zeros((1, 2), np.int16))
    for tokens, kept in ((50, plans), (49, None)):
        assert planning._usable(EarlyPlan(plans, here, tokens), here, 100) is kept
    assert planning._usable(EarlyPlan(plans, here, 100), Placement(here.home + 1), 100) is None
    assert planning._usable(None, here, 100) is None
    assert planning._usable(EarlyPlan(), here, 100) is None
