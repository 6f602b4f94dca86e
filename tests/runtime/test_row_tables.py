"""Row tables: made in chunks by any thread, once, and kept for a second pass."""

from __future__ import annotations

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
from trimtab.runtime.rows.rank_load import RankLoad
from trimtab.runtime.rows.row_tables import LayerTables, RowTables


def numbered(layer: int) -> LayerTables:
    return LayerTables(torch.full((2, 1), layer))


def test_an_error_of_the_thread_is_raised_where_the_tables_are_used() -> None:
    def make(layer: int) -> LayerTables:
        if layer == 1:
            raise ValueError("the tokens are not those that were planned")
        return numbered(layer)

    tables = RowTables(make, 3, None)
    with pytest.raises(ValueError, match="not those"):
        tables.make_all()
    assert not tables.is_made
    tables.of(0)
    with pytest.raises(ValueError, match="not those"):
        tables.of(1)


def a_step(micro_steps: int) -> RunningStep:
    """A step of one rank with two layers."""
    rng = np.random.default_rng(0)
    trace = random_trace(rng, num_sequences=4 * micro_steps, max_length=20, num_layers=2, num_experts=4, top_k=2)
    schedule = random_schedule(rng, trace.num_sequences, num_ranks=1, num_micro_steps=micro_steps)
    workload = Workload.from_trace(trace, schedule)
    plan = random_plan(rng, workload, schedule, slots=1, placement=Placement.contiguous(2, 4, 1))
    homes: Any = SimpleNamespace(
        sends_rows=True, home_E=np.zeros(4, np.int16), rows_E=np.arange(4), device=torch.device("cpu"), places=None
    )
    transfers: Any = object()
    topology: Any = SimpleNamespace(rank=0, positions=(0,), num_ranks=1)
    load = RankLoad(workload.token_counts_MLRE[:, :, 0], workload.unknown_MLR[:, :, 0], topology)
    mine = trace.select(schedule.sequences_of(0))
    return RunningStep(
        topology, [homes, homes], plan, load, load.counts_MLE[None], mine, schedule, transfers, number=1, num_slots=1
    )  # fmt: skip


def test_tables_are_kept_for_a_second_pass_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    step = a_step(micro_steps=6)

    def run(index: int) -> RowTables:
        tables = step.tables_of(index, has_slices=True)
        tables.make_all()
        return tables

    first = [run(index) for index in range(6)]
    assert [run(index) is first[index] for index in range(6)] == [True] * 6
    # Room for about three of them: the first ones stay, since a further pass begins with them.
    monkeypatch.setattr(micro_step, "KEPT_BYTES", sum(tables.nbytes for tables in first[:3]) + 1)
    step = a_step(micro_steps=6)
    again = [weakref.ref(run(index)) for index in range(6)]
    kept = [tables() is not None for tables in again]
    assert kept[:2] == [True, True]
    assert kept.count(True) < 6
