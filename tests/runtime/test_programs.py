"""Programs of micro-steps: made in chunks by any thread, once, and kept for a second pass."""

from __future__ import annotations

import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.random_plans import random_plan, random_schedule, random_trace
from trimtab.planner import Placement, Workload
from trimtab.runtime.layer import micro_step
from trimtab.runtime.layer.micro_step import RunningStep
from trimtab.runtime.layer.programs import Programs, UploadedPrograms
from trimtab.runtime.planning.rank_load import RankLoad
from trimtab.runtime.program.physical_experts import PhysicalExperts
from trimtab.runtime.program.program import Program
from trimtab.runtime.state.expert_places import ExpertPlaces
from trimtab.runtime.transfer.streams import BackgroundCopies


def numbered(layer: int) -> Program:
    return Program(torch.full((2, 1), layer))


def test_an_error_of_the_thread_is_raised_where_the_tables_are_used() -> None:
    def make(layer: int) -> Program:
        if layer == 1:
            raise ValueError("the tokens are not those that were planned")
        return numbered(layer)

    programs = Programs(make, 3, None)
    with pytest.raises(ValueError, match="not those"):
        programs.make_all()
    assert not programs.is_made
    programs.of(0)
    with pytest.raises(ValueError, match="not those"):
        programs.of(1)


def test_programs_are_uploaded_while_a_thread_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")

    def slow(_: Program) -> int:
        time.sleep(0.02)
        return 16

    monkeypatch.setattr(Program, "nbytes", property(slow))
    copies = BackgroundCopies(cpu)
    for _ in range(3):
        programs = Programs(numbered, 4, cpu)
        thread = threading.Thread(target=programs.make_all)
        thread.start()
        uploaded = UploadedPrograms(programs, copies)
        for layer in range(4):
            recorded = uploaded.of(layer).recorded_NK
            assert recorded is not None
            assert recorded.tolist() == [[layer], [layer]]
        thread.join()
    copies.close()


def a_step(micro_steps: int) -> RunningStep:
    """A step of one rank with two layers."""
    rng = np.random.default_rng(0)
    trace = random_trace(rng, num_sequences=4 * micro_steps, max_length=20, num_layers=2, num_experts=4, top_k=2)
    schedule = random_schedule(rng, trace.num_sequences, num_ranks=1, num_micro_steps=micro_steps)
    workload = Workload.from_trace(trace, schedule)
    plan = random_plan(rng, workload, schedule, slots=1, placement=Placement.contiguous(2, 4, 1))
    homes: Any = SimpleNamespace(sends_rows=True, device=torch.device("cpu"))
    experts = PhysicalExperts.of(ExpertPlaces.at(np.zeros(4, np.int16)), 0, (0,), 1)
    transfers: Any = object()
    topology: Any = SimpleNamespace(rank=0)
    load = RankLoad(workload.token_counts_MLRE[:, :, 0], workload.unknown_MLR[:, :, 0], topology)
    mine = trace.select(schedule.sequences_of(0))
    return RunningStep(
        topology, [homes, homes], plan, load, load.counts_MLE[None], mine, schedule, transfers, 1, experts
    )  # fmt: skip


def test_tables_are_kept_for_a_second_pass_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    step = a_step(micro_steps=6)

    def run(index: int) -> Programs:
        programs = step.programs_of(index, has_slices=True)
        programs.make_all()
        return programs

    first = [run(index) for index in range(6)]
    assert [run(index) is first[index] for index in range(6)] == [True] * 6
    # Room for about three of them: the first ones stay, since a further pass begins with them.
    monkeypatch.setattr(micro_step, "KEPT_BYTES", sum(programs.nbytes for programs in first[:3]) + 1)
    step = a_step(micro_steps=6)
    again = [weakref.ref(run(index)) for index in range(6)]
    kept = [programs() is not None for programs in again]
    assert kept[:2] == [True, True]
    assert kept.count(True) < 6
