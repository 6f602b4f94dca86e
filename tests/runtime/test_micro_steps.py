"""Micro-steps with any rows, entered in pipeline orders, equal the unbalanced model on one process."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from helpers.equality import relative_error
from helpers.moe_model import Shape, TinyMoE
from helpers.planned_steps import make
from helpers.random_plans import random_trace
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import InputError
from trimtab.planner import Schedule
from trimtab.runtime import Session
from trimtab.runtime.layer import micro_step
from trimtab.runtime.layer.micro_step import BoundRoutes


def make_session(**settings: Any) -> tuple[Session, TinyMoE]:
    session, model, _ = make(torch.float64, shape=Shape(layers=3, experts=4, top_k=2, hidden=8, width=8), **settings)
    return session, model


def random_rows(rng: np.random.Generator, tokens: int) -> np.ndarray:
    return np.argsort(rng.random((tokens, 3, 4)), axis=-1)[:, :, :2]


@runs_on_ranks()
@mock.patch.object(micro_step, "KEPT_BYTES", 0)
def test_memory_does_not_grow_with_micro_steps() -> None:
    """Memory of layers is freed, also if the loop keeps losses and micro-steps. Programs have a limit of their own."""
    session, model = make_session(least_gain=-1.0)
    rng = np.random.default_rng(torch.distributed.get_rank())
    count, tokens = 60, torch.zeros(64, dtype=torch.int64)
    # At first all rows are of one rank's experts, which get replicas.
    uneven = [np.tile(np.arange(2), (64, 3, 1))] * 8
    session.plan_micro_steps([*uneven, *(random_rows(rng, 64) for _ in range(count - len(uneven)))])
    assert session.step_plan.num_replicas >= len(uneven)
    steps, losses, after = [session.micro_step(m) for m in range(count)], [], []
    for m, step in enumerate(steps):
        with torch.no_grad(), step:
            model(tokens)
        with step:
            losses.append(F.cross_entropy(model(tokens), tokens))
        if m:
            losses[m - 1].backward()
        if m % 12 == 11:
            gc.collect()
            after.append(sum(t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype is torch.int64))
    assert max(after[1:]) <= after[0] + 4096, after
    # On a device routes have tables of their own.
    assert sum(isinstance(each, BoundRoutes) for each in gc.get_objects()) <= 2


@runs_on_ranks()
def test_a_micro_step_is_bound_once_for_all_its_forwards() -> None:
    session, model = make_session()
    rng = np.random.default_rng(torch.distributed.get_rank())
    session.plan_micro_steps([random_rows(rng, 5) for _ in range(2)])
    tokens = torch.zeros(5, dtype=torch.int64)
    with session.micro_step(0):
        loss = model(tokens).sum()
    step = session.micro_step(0)
    routes = step.routes(True, True)
    with step:
        assert step.routes(True, True) is routes
        other = model(tokens).sum()
    with session.micro_step(1), pytest.raises(RuntimeError, match="while micro-step 1 is open"), step:
        pass
    (loss + other).backward()
    session.plan_micro_steps([random_rows(rng, 5)])
    with pytest.raises(RuntimeError, match="of an earlier plan"), step:
        pass


@runs_on_ranks()
def test_forwards_of_one_micro_step_may_be_planned_or_not() -> None:
    """Rank 1 has another batch in the second forward, before the first one's backward."""
    rng = np.random.default_rng(0)
    trace = random_trace(rng, num_sequences=4, max_length=6, num_layers=3, num_experts=4, top_k=2)
    schedule = Schedule(np.zeros(4, np.int32), np.array([0, 1, 0, 1], np.int32), np.zeros(1, np.int32), 2)
    gradients: list[list[torch.Tensor]] = []
    for run in ("plain", "checkpoint", "reentrant checkpoint"):
        session, model = make_session()
        model.run_block = run
        mine = trace.select(schedule.sequences_of(session.rank))
        session.plan(mine, schedule)
        other = mine.sequence_hashes + np.uint64(session.rank)
        tokens = torch.arange(mine.num_tokens) % 11
        losses: list[torch.Tensor] = []
        for hashes in (None, other if session.rank else None, mine.sequence_hashes):
            with session.micro_step(0, sequence_hashes=hashes):
                losses.append(model(tokens).square().sum() * (1 + len(losses)))
        assert session.counters.unplanned_micro_steps == 1
        torch.stack(losses).sum().backward()
        session.finish_gradients(model.replicated())
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for others in gradients[1:]:
        for grad, expected in zip(others, gradients[0], strict=True):
            assert relative_error(grad, expected) < 1e-12


@runs_on_ranks()
def test_errors_name_invalid_rows() -> None:
    session, _ = make_session()
    rank = torch.distributed.get_rank()
    rows = random_rows(np.random.default_rng(0), 5)
    bad = rows.copy()
    bad[2, 1] = 4
    for given, message in (
        ([], "there are no micro-steps"),
        ([rows[:, :2]], "the trace has 2 MoE layers"),
        ([rows, rows.astype(float)], "micro-step 1 has ids"),
        ([rows, rows[:, :, :1]], "micro-step 1 has ids"),
        ([rows, bad], "micro-step 1 has expert id 4"),
    ):
        # An error on one rank is raised on all ranks.
        with pytest.raises((InputError, RuntimeError), match=message):
            session.plan_micro_steps(given if rank == 1 or len(given) != 2 else [rows, rows])
    with pytest.raises(RuntimeError, match="needs a step that this session has planned"):
        session.complete_plan()
    partly = rows.copy()
    partly[0, 0, 0] = -1
    with pytest.raises(InputError, match="or all"):
        session.plan_micro_steps([partly])
    session.plan_micro_steps([rows])
    session.micro_step(0).__enter__()
