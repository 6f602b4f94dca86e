"""Steps at the edges: precisions, inference mode, rows that are no record, overwritten ids, failures, waits."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import time
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

from helpers.equality import relative_error
from helpers.moe_model import ALL_LISTS, TinyMoE, matches
from helpers.planned_steps import SHAPE, Step, make
from helpers.rank_tests import of_all_ranks, runs_on_ranks
from trimtab.errors import InputError
from trimtab.planner.plan.slices import SlicePlanner
from trimtab.runtime import Session, gated_experts, step_planner
from trimtab.runtime.ranks import lockstep

LISTED = replace(SHAPE, lists=ALL_LISTS)


def check_gradients(model: TinyMoE, reference: TinyMoE, tolerance: float) -> None:
    for name, parameter, whole, mine in matches(model, reference):
        assert parameter.grad is not None, name
        assert whole.grad is not None, name
        assert relative_error(parameter.grad.double(), whole.grad[mine].double()) < tolerance, name


@pytest.mark.parametrize("compute", [torch.float64, torch.int8, torch.float8_e4m3fn])
@runs_on_ranks()
def test_compute_in_a_dtype_without_use_is_refused(compute: torch.dtype) -> None:
    session = Session(num_experts=4)
    experts = [nn.Parameter(torch.zeros(2, 6, 4)), nn.Parameter(torch.zeros(2, 4, 3))]
    with pytest.raises(InputError, match=f"MoE layer 0: .*{compute}"):
        session.add_layer(experts, gated_experts(), compute_dtype=compute)


class LocalError(Exception):
    """Of a class that other ranks could not load."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(("kind", "arguments"), [(LocalError, (1, 2)), (InputError, ("1 and 2",))])
@runs_on_ranks()
def test_any_error_of_the_first_ranks_planner_is_raised_on_all_ranks(
    kind: type[Exception], arguments: tuple[object, ...]
) -> None:
    session, _, _ = make()
    step = Step(7)
    mine = step.trace.select(step.schedule.sequences_of(session.rank))

    def fail(*_: object, **__: object) -> None:
        raise kind(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_planner, "plan_schedule", fail)
        with pytest.raises((LocalError, RuntimeError, InputError), match="1 and 2") as raised:
            session.plan(mine, step.schedule)
        if session.rank:
            assert type(raised.value) is (InputError if kind is InputError else RuntimeError)
            assert kind is InputError or "rank 0 failed: LocalError" in str(raised.value)
    session.plan(mine, step.schedule)


@runs_on_ranks()
def test_a_planner_thread_that_is_told_to_end_leaves_the_step_unbalanced() -> None:
    """SystemExit is no Exception: nothing waits for its plans for ever."""
    session, model, reference = make(least_gain=-1.0)
    step = Step(8)

    def end(*_: object, **__: object) -> None:
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlicePlanner, "plan", end)
        session.plan(step.trace.select(step.schedule.sequences_of(session.rank)), step.schedule)
        step.reference_loss(reference).backward()
        step.run(session, model)
        assert session.step_plan.num_replicas == 0
    check_gradients(model, reference, 1e-5)


@pytest.mark.parametrize("has_hashes", [True, False])
@pytest.mark.parametrize("wrong", ["order", "rows"])
@runs_on_ranks()
def test_a_plan_is_of_its_sequences_in_their_order(has_hashes: bool, wrong: str) -> None:
    session, _, _ = make()
    step = Step(10)
    hashes = np.arange(1, step.trace.num_sequences + 1, dtype=np.uint64)
    trace = replace(step.trace, sequence_hashes=hashes) if has_hashes else step.trace
    planned = session.plan_sequences(trace.select(np.arange(4) + 4 * session.rank), token_budget=200)
    mine = trace.select(planned.schedule.sequences_of(session.rank))
    # On one rank, and refused on both.
    other, first_wrong = mine, 0
    if wrong == "order":
        # The last two.
        first_wrong = of_all_ranks(mine.num_sequences)[1] - 2
    if session.rank and wrong == "order":
        other = mine.select(np.r_[:first_wrong, first_wrong + 1, first_wrong])
    elif session.rank:
        other = replace(mine, expert_ids=mine.expert_ids[::-1], sequence_hashes=np.zeros_like(mine.sequence_hashes))
    with pytest.raises(InputError, match=f"sequence {first_wrong} of this rank's trace is not the planned one"):
        session.apply_plan(planned, other)
    session.apply_plan(planned, mine)


@runs_on_ranks()
def test_positions_with_a_row_twice_are_refused_on_all_ranks() -> None:
    session, _, _ = make()
    step = Step(9)
    session.plan(step.trace.select(step.schedule.sequences_of(session.rank)), step.schedule)
    wrong = torch.tensor([3, 1, 3] if session.rank else [0, 2, 1])
    for open_step in (partial(session.micro_step, 0), session.live_micro_step):
        with pytest.raises(InputError, match="row twice"), open_step(positions=wrong):
            pass


@runs_on_ranks()
def test_a_long_wait_is_told_once_with_its_call_and_ranks() -> None:
    session, _, _ = make()
    Step(1).apply(session)
    messages: list[str] = []
    store = dist.distributed_c10d._get_default_store()

    def emit(record: logging.LogRecord) -> None:
        messages.append(record.getMessage())
        store.set("told", "")

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lockstep, "COMPARE_AFTER_S", 0.2)
        logging.getLogger("trimtab").addHandler(handler)
        for tell_after_s in (0.1, 600):
            patch.setattr(lockstep, "TELL_AFTER_S", 600 if session.rank else tell_after_s)
            if session.rank:
                # Rank 0 has waited for long enough, and in the second round for no shorter.
                store.wait(["told"])
                time.sleep(0.5)
            with session.micro_step(0):
                pass
        logging.getLogger("trimtab").removeHandler(handler)
    expected = "rank 0 waits in micro_step(0) for rank 1; all were last seen in apply_plan()"
    assert [text for text in messages if "waits" in text] == [expected] * (session.rank == 0)


def end_early(rank: int, port: int, results: Connection) -> None:
    """Rank 0 holds the store, and ends after planning. Rank 1 goes on."""
    store = TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    session, model, _ = make()
    step = Step(1)
    step.apply(session)
    if rank == 0:
        os._exit(0)
    try:
        step.run(session, model)
    except Exception as error:
        results.send(f"{type(error).__name__}: {error}")
    os._exit(0)


def test_a_rank_that_ends_with_the_store_is_a_disagreement() -> None:
    """In a run without torchrun, whose agent would hold the store."""
    context = multiprocessing.get_context("forkserver")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours, theirs = context.Pipe(duplex=False)
    ranks = [context.Process(target=end_early, args=(rank, port, theirs)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    theirs.close()
    try:
        text = ours.recv()
    finally:
        for rank in ranks:
            rank.kill()
    assert text.startswith("RanksDisagreeError: rank 1 waited in micro_step(0), and the rank that holds the store"), (
        text
    )
    assert "all were last seen in apply_plan()" in text
