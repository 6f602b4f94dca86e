"""A `Planner` plans many steps without growth of memory. `TRIMTAB_SOAK_SECONDS` sets the time."""

from __future__ import annotations

import os
import time

from helpers.memory import resident_bytes
from trimtab import ClusterSpec, Placement
from trimtab.planner import Planner
from trimtab.trace import PRESETS, synthesize_preset

SECONDS = float(os.environ.get("TRIMTAB_SOAK_SECONDS", "600"))
LAYERS, EXPERTS, RANKS = 4, 128, 16


def test_plans_need_no_more_memory_than_the_first_ones() -> None:
    traces = [
        synthesize_preset(
            PRESETS["qwen3-30b-math"], num_sequences=256, mean_length=256, max_length=1024, num_layers=LAYERS,
            num_experts=EXPERTS, top_k=8, seed=seed,
        )
        for seed in range(4)
    ]  # fmt: skip
    planner = Planner(ClusterSpec(RANKS, 8, 2), Placement.contiguous(LAYERS, EXPERTS, RANKS), threads=2)
    start = time.monotonic()
    before = plans = micro_steps = 0
    while (passed := time.monotonic() - start) < SECONDS or not plans:
        planner.add(traces[plans % len(traces)])
        (plan,) = planner.finish(token_budget=2048)
        if not before and passed > SECONDS / 3:
            before, plans = resident_bytes(), 0
        plans += 1
        micro_steps = plan.num_micro_steps
    grown = resident_bytes() - before
    # Counts `[M, R, E]` int32 of one layer, for each plan.
    lost = plans * micro_steps * RANKS * EXPERTS * 4
    print(f"{before / 1e6:.1f} MB, {grown / 1e6:+.1f} MB after {plans} plans; one layer's counts: {lost / 1e6:.1f} MB")
    # A quarter of what is lost if the counts of one layer stay in memory after each plan.
    assert grown < lost / 4
