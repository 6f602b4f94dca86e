"""The examples run as they say: the one at the root without torch, the others alone and under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
STEP = re.compile(r"step \d+: .*loss (\S+), (\d+) replicas, max_vio (\S+) before, (\S+) (?:planned|after)")


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


def test_supervised_fine_tuning_learns_and_is_balanced_from_live_routing() -> None:
    assert len((EXAMPLES / "sft_live.py").read_text().splitlines()) <= 60
    steps = run_example("sft_live.py")
    assert len(steps) == 6
    assert steps[-1][0] < steps[0][0] / 4
    assert all(replicas > 0 for _, replicas, _, _ in steps)
    assert all(after < before / 5 for _, _, before, after in steps)


def test_a_layer_of_ones_own_learns_and_is_balanced_under_torchrun() -> None:
    steps = run_example("own_moe_layer.py", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert len(steps) == 4
    assert steps[-1][0] < steps[0][0] / 2
    assert sum(replicas for _, replicas, _, _ in steps) > 0
    assert all(after < before for _, _, before, after in steps)


def test_a_megatron_loop_learns_and_is_balanced_under_torchrun() -> None:
    assert len((EXAMPLES / "megatron_loop.py").read_text().splitlines()) <= 120
    steps = run_example("megatron_loop.py", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert len(steps) == 4
    # Two updates on the same responses: the first one's ratios are 1, the second one's loss is lower.
    losses = [loss for loss, _, _, _ in steps]
    assert all(abs(first) < 1e-4 and second < -1e-3 for first, second in zip(losses[::2], losses[1::2], strict=True))
    assert sum(replicas for _, replicas, _, _ in steps) > 0
    assert all(after < before for _, _, before, after in steps)


def test_a_trl_script_learns_and_is_balanced_under_torchrun() -> None:
    steps = run_example("trl_grpo.py", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert len(steps) == 6
    assert sum(replicas for _, replicas, _, _ in steps) > 0
    assert all(after < before for _, _, before, after in steps)


def test_the_first_example_plans_a_trace_without_torch() -> None:
    path = ROOT / "example.py"
    assert len(path.read_text().splitlines()) <= 40
    program = (
        f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(path)!r}, run_name='__main__'); "
        "assert sys.modules['torch'] is None"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    printed, table = result.stdout.split("layer  static  planned\n")
    assert "AnalysisResult: trace in memory" in printed
    assert "PlanResult: trace in memory" in printed
    rows = [line.split() for line in table.splitlines()]
    assert [layer for layer, _, _ in rows] == ["0", "1", "2", "3"]
    assert all(float(planned) < 1.05 < 1.3 < float(static) for _, static, planned in rows)
