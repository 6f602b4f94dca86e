"""Sequences that are counted while others generate give the plans of a step that is counted at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from helpers.moe_model import Shape
from helpers.planned_steps import make
from helpers.planner_steps import free_replicas, skewed_trace
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import InputError
from trimtab.planner import SequenceCounts
from trimtab.runtime import PlannedStep, Session
from trimtab.runtime.step_planner import SessionPlanner
from trimtab.trace import RoutingTrace
from trimtab.trace.numbering import Numbering

LAYERS, EXPERTS, TOP_K, BUDGET = 2, 8, 2, 300
MAKE = SessionPlanner.of


def make_planner(*args: Any, **options: Any) -> SessionPlanner:
    made = MAKE(*args, **options)
    return replace(made, costs=free_replicas(made.cluster))


replicas_cost_nothing = mock.patch.object(SessionPlanner, "of", make_planner)


def make_session(**options: Any) -> Session:
    return make(shape=Shape(layers=LAYERS, experts=EXPERTS, top_k=TOP_K, hidden=8, width=8), **options)[0]


def rank_trace(count: int = 20, rank: int | None = None) -> RoutingTrace:
    """Sequences of this rank."""
    rng = np.random.default_rng((3, dist.get_rank() if rank is None else rank))
    trace = skewed_trace(rng, sequences=count, layers=LAYERS, experts=EXPERTS, top_k=TOP_K, max_length=60)
    # A response occurs twice.
    trace = replace(trace, sequence_hashes=rng.integers(1, 1 << 60, trace.num_sequences).astype(np.uint64))
    return trace.select([*range(count), 3])


def plan(session: Session, trace: RoutingTrace, parts: list[np.ndarray]) -> PlannedStep:
    """The plan of a step of which some parts are counted ahead."""
    for part in parts:
        session.plan_ahead(trace.select(part), token_budget=BUDGET)
    return session.plan_sequences(trace, token_budget=BUDGET)


@contextmanager
def counting() -> Iterator[list[int]]:
    """Yields how many sequences were counted in each call."""
    counted: list[int] = []
    plain = SequenceCounts.from_trace

    def count(trace: RoutingTrace) -> SequenceCounts:
        counted.append(trace.num_sequences)
        return plain(trace)

    with mock.patch.object(SequenceCounts, "from_trace", count):
        yield counted


@runs_on_ranks()
@replicas_cost_nothing
def test_any_order_of_finished_sequences_gives_the_same_plan() -> None:
    trace, session = rank_trace(), make_session()
    at_once = plan(session, trace, [])
    assert at_once.slices is not None
    assert (at_once.known_ahead, at_once.ahead_s) == (0.0, 0.0)
    plans = set()
    for seed in range(3):
        order = np.random.default_rng((seed, dist.get_rank())).permutation(trace.num_sequences)
        cuts = np.sort(np.random.default_rng((9, seed, dist.get_rank())).integers(0, trace.num_sequences, 2))
        ahead = plan(session, trace, np.split(order, cuts))
        assert ahead.known_ahead > 0.8
        assert min(ahead.ahead_s, ahead.planning_s) > 0
        assert np.array_equal(ahead.schedule.micro_step, at_once.schedule.micro_step)
        assert np.array_equal(ahead.schedule.rank, at_once.schedule.rank)
        plans.add(ahead.plan.hash)
    assert len(plans) == 1
    # Sequences that are not trained are counted, but have no place in the schedule.
    more = RoutingTrace.concatenate([trace, replace(trace, sequence_hashes=trace.sequence_hashes + 1)])
    session.plan_ahead(more, token_budget=BUDGET)
    assert len(plan(session, trace, []).schedule.rank) == 2 * trace.num_sequences
    # The next step is counted anew.
    assert plan(session, trace, []).ahead_s == 0.0


@runs_on_ranks()
@replicas_cost_nothing
def test_figures_of_slices_are_those_of_the_whole_plan() -> None:
    trace, session = rank_trace(), make_session()
    planned = plan(session, trace, [np.arange(10)])
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, trace)
    mine = RoutingTrace.concatenate(parts).select(planned.schedule.sequences_of(dist.get_rank()))
    report = session.apply_plan(planned, mine)
    assert report.is_sliced
    assert report.waited_s >= report.planning_s > 0
    whole, metrics, loads = session.step_plan, session.take_metrics(), session.rank_loads
    assert metrics["moe/planned_replicas"] == whole.num_replicas > 0
    max_vio = float((loads.max(axis=2) * loads.shape[2] / loads.sum(axis=2) - 1).mean())
    assert metrics["moe/planned_max_vio"] == pytest.approx(max_vio, abs=1e-5)
    assert metrics["moe/max_vio_error"] == pytest.approx(max_vio - report.max_vio_after, abs=1e-5)
    # Its slices are planned already.
    session.apply_plan(replace(planned, plans=(whole,), slices=None), mine)
    assert np.array_equal(session.rank_loads, loads)


@runs_on_ranks()
def test_sequences_are_counted_once() -> None:
    with counting() as counted:
        plan(make_session(), rank_trace(), [np.arange(5), np.arange(15)])
    assert counted == [5, 10, 5]


@contextmanager
def warnings_of_trimtab() -> Iterator[list[str]]:
    """Messages that are logged as warnings in the context."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    with mock.patch.object(handler, "emit", lambda record: messages.append(record.getMessage())):
        logging.getLogger("trimtab").addHandler(handler)
        try:
            yield messages
        finally:
            logging.getLogger("trimtab").removeHandler(handler)


@runs_on_ranks()
def test_a_failure_ahead_is_told_and_the_step_is_planned_at_once() -> None:
    """All ranks count all of their sequences again. Where a rank has ended, others are quiet until a call of theirs
    fails, which names it.
    """
    for where, error in ((SessionPlanner, MemoryError("no memory")), (dist, RuntimeError("connection closed by peer"))):
        trace, session = rank_trace(), make_session()
        # The exchange of the schedule is another.
        name = "plan_ahead" if where is SessionPlanner else "gather_object"
        with warnings_of_trimtab() as warnings, counting() as counted:
            with mock.patch.object(where, name, side_effect=error):
                session.plan_ahead(trace.part(0, 15), token_budget=BUDGET)
                assert session._in_rollout is not None
                has_failed = where is dist or dist.get_rank() == 0
                assert session._in_rollout.is_complete() == (not has_failed)
            planned = plan(session, trace, [])
        assert len(planned.schedule.rank) == 2 * trace.num_sequences
        assert planned.known_ahead == 0.0
        assert counted == [15, 21]
        tells = where is SessionPlanner and dist.get_rank() == 0
        assert ["no memory" in warning for warning in warnings] == [True] * tells


@runs_on_ranks()
def test_suspension_waits_for_what_is_planned_ahead() -> None:
    """Its messages go through groups that suspension drops."""
    trace, session = rank_trace(), make_session()
    plain, ended = SessionPlanner.plan_ahead, []

    def slowly(*args: Any, **options: Any) -> PlannedStep:
        time.sleep(0.3)
        planned = plain(*args, **options)
        ended.append(planned)
        return planned

    with mock.patch.object(SessionPlanner, "plan_ahead", slowly):
        session.plan_ahead(trace, token_budget=BUDGET)
        session.suspend()
        assert len(ended) == (dist.get_rank() == 0)
    assert plan(session, trace, []).known_ahead == 0.0


@runs_on_ranks()
def test_a_rank_without_hashes_counts_nothing_ahead() -> None:
    """The error of a rank is its own; the others plan."""
    trace, session, second = rank_trace(), make_session(), dist.get_rank() == 1
    with counting() as counted:
        if second:
            with pytest.raises(InputError, match="needs sequence_hashes of all sequences"):
                session.plan_ahead(replace(trace, sequence_hashes=trace.sequence_hashes * 0), token_budget=BUDGET)
        else:
            session.plan_ahead(trace, token_budget=BUDGET)
        plan(session, trace, [])
    assert counted == ([0, 21] if second else [21, 0])


@pytest.mark.parametrize(("count", "renumbers"), [(10, False), (14, False), (14, True)])
@runs_on_ranks()
@replicas_cost_nothing
def test_a_strategy_is_chosen_again_if_less_than_half_was_known(count: int, renumbers: bool) -> None:
    """Also if experts have other ids since."""
    traces, session = [rank_trace(rank=rank) for rank in range(2)], make_session()
    trace = traces[dist.get_rank()]
    session.plan_ahead(trace.select([*range(count)]), token_budget=BUDGET)
    if renumbers:
        session.renumber([np.arange(session.num_experts)[::-1]] * len(session.layers))
        trace = replace(trace, numbering=Numbering())
    known = sum(
        each.sequence_lengths[np.isin(each.sequence_hashes, each.sequence_hashes[:count])].sum() for each in traces
    )
    share = known / sum(each.num_tokens for each in traces)
    assert 0.5 < share < 0.75 if count == 14 else 0.4 < share < 0.5
    known_ahead = plan(session, trace, []).known_ahead
    assert known_ahead == (pytest.approx(share) if count == 14 and not renumbers else 0.0)


@runs_on_ranks()
@replicas_cost_nothing
def test_limits_of_rows_are_planned_at_once() -> None:
    """Rows are limited in whole plans only."""
    planned = plan(make_session(max_rows_per_rank=10**6), rank_trace(), [np.arange(21)])
    assert planned.slices is None
    assert planned.known_ahead == 0.0
