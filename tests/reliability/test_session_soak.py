"""A `Session` runs many micro-steps without growth of memory. `TRIMTAB_SOAK_MICRO_STEPS` sets their number."""

from __future__ import annotations

import os
from typing import Any

import torch

from helpers.memory import resident_bytes
from helpers.moe_model import Shape
from helpers.planned_steps import Step, make
from helpers.rank_pool import RankPool

MICRO_STEPS = int(os.environ.get("TRIMTAB_SOAK_MICRO_STEPS", "300"))
SHAPE = Shape(layers=4, experts=8, top_k=2, hidden=256, width=128)
# Of each `Step`.
PER_STEP = 2
# Steps of different sizes, which repeat: new sizes would fragment the heap, which is no leak.
SIZES = 20


def run_steps(state: dict[str, Any], first: int, end: int) -> tuple[int, int]:
    """Steps with new plans, replicas and homes. Returns resident memory, and bytes of all rows that were sent."""
    if not state:
        session, model, _ = make(shape=SHAPE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        session.register_optimizers(optimizer)
        state |= {"session": session, "model": model, "optimizer": optimizer}
    row_bytes = 0
    for number in range(first, end):
        step = Step(number % SIZES, shape=SHAPE, long=512)
        step.apply(state["session"])
        step.run(state["session"], state["model"])
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        mine = step.schedule.sequences_of(state["session"].rank)
        row_bytes += int(step.trace.sequence_lengths[mine].sum()) * SHAPE.top_k * SHAPE.hidden * 4
    return resident_bytes(), row_bytes


def test_micro_steps_need_no_more_memory_than_the_first_ones(pool: RankPool) -> None:
    steps = -(-MICRO_STEPS // PER_STEP)
    memory: list[list[int]] = []
    row_bytes = [0, 0]
    for number in range(steps):
        found = pool.call(run_steps, number, number + 1)
        memory.append([resident for resident, _ in found])
        if number > steps // 3:
            row_bytes = [total + rows for total, (_, rows) in zip(row_bytes, found, strict=True)]
    for rank, rows in enumerate(row_bytes):
        before, after = memory[steps // 3][rank], memory[-1][rank]
        print(f"rank {rank}: {before / 1e6:.1f} MB, then {after / 1e6:.1f} MB; one buffer of rows: {rows / 1e6:.1f} MB")
        # A quarter of what is lost if the rows of one layer stay in memory after each micro-step.
        assert after - before < rows / 4, rank
