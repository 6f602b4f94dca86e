"""The examples run as they say, alone and under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
STEP = re.compile(r"step \d+: .*loss (\S+), (\d+) replicas, max_vio (\S+) before, (\S+) planned")


def run_example(name: str, *launcher: str) -> list[tuple[float, int, float, float]]:
    """Loss, replicas, and max_vio before and after of every step."""
    command = [sys.executable, *launcher, str(EXAMPLES / name)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = (STEP.fullmatch(line) for line in result.stdout.splitlines())
    return [(float(m[1]), int(m[2]), float(m[3]), float(m[4])) for m in lines if m]


def test_a_transformers_loop_is_balanced_in_every_step() -> None:
    steps = run_example("transformers_loop.py")
    assert len(steps) == 2
    assert sum(replicas for _, replicas, _, _ in steps) > 0
    assert all(after < before for _, _, before, after in steps)


def test_a_layer_of_ones_own_learns_and_is_balanced_under_torchrun() -> None:
    steps = run_example("own_moe_layer.py", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert len(steps) == 4
    assert steps[-1][0] < steps[0][0] / 2
    assert sum(replicas for _, replicas, _, _ in steps) > 0
    assert all(after < before for _, _, before, after in steps)
