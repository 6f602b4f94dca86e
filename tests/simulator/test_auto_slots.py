"""With `auto` slots a step is about as fast as with the best fixed number, in steady state, whatever transfers cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import trimtab
from trimtab.cluster import load_cluster
from trimtab.cluster.spec_files import write_cluster
from trimtab.simulator.comparison import fits
from trimtab.trace import PRESETS, synthesize_preset

# The number is chosen by an earlier step than the one that is measured.
MOST_BEHIND = 0.01


@pytest.mark.parametrize("seed", range(8))
def test_auto_is_about_as_fast_as_the_best_number(seed: int, tmp_path: Path) -> None:
    rng, tax = np.random.default_rng([75, seed]), (0.0, 0.15, 0.3, 0.5)[seed // 2]
    micro_steps = int(rng.choice([2, 4]))
    preset = PRESETS[str(rng.choice(["qwen3-30b-math", "qwen3-30b-mixed", "qwen3.5-35b-text"]))]
    trace = synthesize_preset(
        preset, num_experts=128, top_k=8, num_sequences=64 * micro_steps, mean_length=1024, max_length=4096,
        num_layers=2, num_steps=2, seed=int(rng.integers(1000)),
    )  # fmt: skip
    name = str(rng.choice(["h200x8", "b200x8"]))
    spec = replace(load_cluster(name, ranks=16), transfer_tax=tax)
    write_cluster(tmp_path / "nodes.toml", spec, {"transfer_tax": "varied"}, base=name)
    result = trimtab.simulate(
        trace,
        trimtab.Run(
            model="qwen3-30b-a3b",
            cluster=tmp_path / "nodes.toml",
            ranks=16,
            micro_steps=micro_steps,
            dispatcher=("tokens", "rows")[seed % 2],
            recompute_granularity="full",
        ).sweep(slots=[2, 4, 8, 16, "auto"]),
        policies="trimtab",
    )
    fitting = {
        case.slots: case.outcomes["trimtab"] for case in result.cases if fits(case.case, case.outcomes["trimtab"])
    }
    seconds = {slots: outcome.simulated.step_time_s for slots, outcome in fitting.items()}
    auto_s = seconds.pop("auto")
    assert auto_s <= (1 + MOST_BEHIND) * min(seconds.values())
