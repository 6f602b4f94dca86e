"""Micro-steps with any rows, entered in pipeline orders, equal the unbalanced model on one process."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from helpers.equality import relative_error
from helpers.examples import examples, nightly_except
from helpers.micro_steps import ORDERS, MicroStepCase, compare_micro_steps
from helpers.moe_model import Shape, TinyMoE
from helpers.planned_steps import make
from helpers.random_plans import random_trace
from helpers.rank_pool import on_ranks
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import InputError
from trimtab.planner import Schedule
from trimtab.runtime import Session
from trimtab.runtime.layer.micro_step import BoundRoutes

UNKNOWN = (0.0, 0.05, 0.5, 1.0)
RUNS = ("plain", "checkpoint", "reentrant checkpoint", "nested checkpoint")


@pytest.mark.longer
@pytest.mark.parametrize(
    ("ranks", "groups", "count"), nightly_except([(2, 1, 8), (3, 1, 2), (4, 1, 2), (4, 2, 2)], (4, 2, 2))
)
def test_rows_of_any_micro_steps_in_any_order(ranks: int, groups: int, count: int) -> None:
    """Slices of sequences, unknown routes, rows that deviate, several active micro-steps, chunks, both dispatchers."""
    rng = np.random.default_rng(ranks + groups)
    cases = [
        MicroStepCase(
            seed, order=ORDERS[seed % 4], unknown=UNKNOWN[(seed + seed // 4) % 4], run_block=str(rng.choice(RUNS)),
            plain=bool(rng.integers(2)), complete=bool(rng.integers(2)), groups=groups,
            given=ranks == 4 and bool(rng.integers(2)), deviates=seed % 3 == 1,
        )
        for seed in range(examples(short=count, long=24 * count))
    ]  # fmt: skip
    on_ranks(compare_micro_steps, (cases,), ranks=ranks)


def make_session(**settings: Any) -> tuple[Session, TinyMoE]:
    session, model, _ = make(torch.float64, shape=Shape(layers=3, experts=4, top_k=2, hidden=8, width=8), **settings)
    return session, model


def random_rows(rng: np.random.Generator, tokens: int) -> np.ndarray:
    return np.argsort(rng.random((tokens, 3, 4)), axis=-1)[:, :, :2]


@runs_on_ranks()
def test_memory_does_not_grow_with_micro_steps() -> None:
    """Memory of layers is freed, also if the loop keeps losses and micro-steps."""
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
def test_a_plan_is_completed_with_routes_of_passes_without_gradients() -> None:
    """This rank's tokens are among rows of padding, whose ids stay as they are."""
    session, _ = make_session()
    rng = np.random.default_rng(torch.distributed.get_rank())
    rows = [random_rows(rng, tokens) for tokens in (7, 0, 5)]
    for ids_NLK in rows:
        ids_NLK[rng.random(ids_NLK.shape[:2]) < 0.4] = -1
    assert session.plan_micro_steps(rows).mixed_instances > 0
    complete: list[torch.Tensor] = []
    for index, ids_NLK in enumerate(rows):
        recorded, length = torch.from_numpy(ids_NLK), len(ids_NLK) + 3
        positions = torch.from_numpy(rng.permutation(length)[: len(recorded)])
        for has_gradients in (False, True):
            ids = torch.from_numpy(random_rows(rng, length))
            wanted = ids.index_copy(0, positions, torch.where(recorded < 0, ids[positions], recorded))
            with torch.set_grad_enabled(has_gradients), session.micro_step(index, positions=positions):
                for at, layer in enumerate(session.layers):
                    routed = layer.route(ids[:, at])
                    assert torch.equal(routed, wanted[:, at])
                    layer(torch.zeros(length, 8, dtype=torch.float64), routed, torch.zeros(length, 2))
            complete += [] if has_gradients else [wanted[positions]]
    assert session.complete_plan().mixed_instances == 0
    for index, wanted in enumerate(complete):
        with session.micro_step(index):
            ids = torch.stack([layer.route(torch.zeros_like(wanted[:, 0])) for layer in session.layers], 1)
        assert torch.equal(ids, wanted)


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
