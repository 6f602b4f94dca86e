"""Memory by owner: what a rank holds, and what is left of it after suspension."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers import late_device
from helpers.equality import relative_error
from helpers.moe_model import TinyMoE
from helpers.planned_steps import Step, make, rows_of
from helpers.random_plans import random_plan
from helpers.rank_tests import runs_on_ranks
from trimtab.runtime.plan_report import RankMemory
from trimtab.runtime.rank_experts import RankExperts

ROUNDS = 20


def in_use(memory: RankMemory) -> dict[str, int]:
    """The figures that are not 0, but for free memory and parameters, which stay."""
    return {k: v for k, v in asdict(memory).items() if v and k not in ("free_bytes", "parameter_bytes")}


def live_bytes() -> tuple[int, int]:
    """Bytes of all tensors of this process, and its mappings of Trimtab's shared memory."""
    gc.collect()
    return tensor_bytes(), Path("/proc/self/maps").read_text().count("/trimtab-")


def tensor_bytes() -> int:
    """Bytes of all tensors of this process, also of those that wait for garbage collection."""
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def compare(model: TinyMoE, whole: TinyMoE, homes: list[int], tolerance: float) -> None:
    """Compare gradients with those of the model on one process; experts are at their first homes."""
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        wanted = other.grad if mine.shape == other.shape else other.grad[homes]
        assert relative_error(mine.grad, wanted) < tolerance


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@runs_on_ranks(4)
def test_rounds_of_sleep_plan_and_training_keep_nothing(compute_dtype: torch.dtype | None) -> None:
    """The same step in every round, with replicas from neighbours' memory, the mirror and messages between nodes."""
    rounds: list[object] = []
    session, model, whole = make(compute_dtype=compute_dtype, ranks_per_node=2)
    step = Step(1)
    step.reference_loss(whole).backward()
    plan = random_plan(step.rng, step.workload, step.schedule, slots=2, placement=step.plan.placement, ranks_per_node=2)
    first: list[torch.Tensor] = []
    with late_device.install("late", peers=True):
        for _ in range(ROUNDS):
            step.apply(session, plan)
            step.run(session, model)
            compare(model, whole, session.home_experts.tolist(), 1e-5 if compute_dtype is None else 0.03)
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            first = first or gradients
            assert all(map(torch.equal, gradients, first))
            model.zero_grad()
            awake = in_use(session.memory())
            assert session.take_metrics()["transfer/peer_memory_bytes"] > 0
            session.suspend()
            assert in_use(session.memory()) == {}
            rounds.append((awake, live_bytes()))
            del gradients
    assert all(one == rounds[1] for one in rounds[1:]), rounds
    assert {"ring_bytes", "return_bytes", "mirror_bytes"} <= set(awake)
    assert "peer_memory_bytes" in awake
    assert live_bytes()[1] == 0
    assert session.memory().parameter_bytes == sum(p.nbytes for layer in session.homes for p in layer.parameters)


def bytes_left(most: float) -> int:
    """Bytes of tensors, after some seconds if there are more than `most`: a thread may hold some for a moment."""
    deadline = time.monotonic() + 60
    while (found := tensor_bytes()) > most and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@runs_on_ranks()
def test_no_step_leaves_memory_to_garbage_collection() -> None:
    """Which runs rarely: a large step has up to a gigabyte of tables of rows in host memory."""
    session, model, _ = make()
    step, left = Step(2), list[int]()
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            step.apply(session)
            step.run(session, model)
            model.zero_grad()
            left.append(bytes_left(most=min(left, default=math.inf) + 100))
    finally:
        gc.enable()
    # Single numbers come and go.
    assert max(left[1:]) - min(left[1:]) < 100, left


@runs_on_ranks()
def test_suspension_ends_when_all_ranks_have_released_their_memory() -> None:
    """Memory that another rank has mapped is not free before."""
    session, _, _ = make()
    Step(1).apply(session)
    close, closed_s = RankExperts.close, [0.0]

    def close_late(experts: RankExperts) -> None:
        time.sleep(0.3 * dist.get_rank())
        close(experts)
        closed_s[0] = time.monotonic()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankExperts, "close", close_late)
        session.suspend()
        returned_s = time.monotonic()
    all_closed_s: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_closed_s, closed_s[0])
    assert returned_s >= max(all_closed_s)


@runs_on_ranks()
def test_tables_on_the_device_are_counted_until_their_backward_has_run() -> None:
    session, model, _ = make()
    sizes: list[int] = []
    with late_device.install("late"):
        step = Step(1)
        step.apply(session)
        rows = rows_of(
            step.trace, np.flatnonzero((step.schedule.rank == session.rank) & (step.schedule.micro_step == 0))
        )
        sizes.append(session.memory().table_bytes)
        with session.micro_step(0):
            loss = step.loss(model, rows)
        sizes.append(session.memory().table_bytes)
        loss.backward()
        del loss
        sizes.append(session.memory().table_bytes)
    assert sizes[1] > 0 == sizes[0] == sizes[2]
