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


def run_step(state: dict[str, Any], number: int) -> int:
    """A step with a new plan, new replicas and homes. Returns the bytes of the rows of one layer that are sent."""
    if not state:
        session, model, _ = make(shape=SHAPE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        session.register_optimizers(optimizer)
        state |= {"session": session, "model": model, "optimizer": optimizer}
    session = state["session"]
    step = Step(number, shape=SHAPE, long=512)
    step.apply(session)
    step.run(session, state["model"])
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    tokens = int(step.trace.sequence_lengths[step.schedule.sequences_of(session.rank)].sum())
    return tokens * SHAPE.top_k * SHAPE.hidden * 4


def test_micro_steps_need_no_more_memory_than_the_first_ones(pool: RankPool) -> None:
    steps = -(-MICRO_STEPS // PER_STEP)
    warm_up = steps // 3
    for number in range(warm_up):
        pool.call(run_step, number)
    before = pool.call(resident_bytes)
    rows = [pool.call(run_step, number) for number in range(warm_up, steps)]
    after = pool.call(resident_bytes)
    for rank, lost in enumerate(map(sum, zip(*rows, strict=True))):
        grown = after[rank] - before[rank]
        print(f"rank {rank}: {before[rank] / 1e6:.1f} MB, {grown / 1e6:+.1f} MB; one layer's rows: {lost / 1e6:.1f} MB")
        # A quarter of what is lost if the rows of one layer stay in memory after each micro-step.
        assert grown < lost / 4, rank
