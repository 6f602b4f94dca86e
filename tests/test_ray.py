"""A trace is counted by tasks of the real Ray: `make test-ray` installs it beside the environment."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

import trimtab
from trimtab.trace import PRESETS, TraceWriter, synthesize_preset

EXAMPLE = Path(__file__).parents[1] / "examples" / "analyze_on_ray.py"
STEPS = 8


@pytest.mark.nightly
def test_eight_shards_of_200_mb_give_the_json_of_one_process(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed: make test-ray")
    path = tmp_path / "trace"
    with TraceWriter(path) as writer:
        for step in range(STEPS):
            size = {"num_sequences": 420, "mean_length": 256, "max_length": 512, "num_layers": 48, "seed": step}
            trace = synthesize_preset(PRESETS["qwen3-30b-mixed"], num_experts=128, top_k=8, **size)
            trace.steps[:] = step
            writer.append(trace)
    assert sum(file.stat().st_size for file in path.iterdir()) > 200e6
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        sharded = runpy.run_path(str(EXAMPLE))["analyze"](str(path), 16, shards=8).figures()
    finally:
        ray.shutdown()
    assert json.dumps(sharded) == json.dumps(trimtab.analyze(path, trimtab.Run(ranks=16)).figures())
