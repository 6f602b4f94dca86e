"""The examples run as they say: the one at the root without torch, the others alone and under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
STEP = re.compile(r"step \d+: .*loss (\S+), (\d+) replicas, max_vio (\S+) before, (\S+) (?:planned|after)")


def run_balanced(name: str, *launcher: str, smaller: float = 1) -> list[float]:
    """Losses of the steps of an example, whose max_vio replicas make so many times smaller or more."""
    output = run(*launcher, str(EXAMPLES / name))
    steps = [match.groups() for line in output.splitlines() if (match := STEP.fullmatch(line))]
    assert sum(int(replicas) for _, replicas, _, _ in steps) > 0
    assert all(float(after) < float(before) / smaller for _, _, before, after in steps)
    return [float(loss) for loss, _, _, _ in steps]


def run(*arguments: str) -> str:
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.nightly
def test_a_transformers_loop_is_balanced_in_every_step() -> None:
    assert len(run_balanced("transformers_loop.py")) == 2


@pytest.mark.nightly
def test_supervised_fine_tuning_learns_and_is_balanced_from_live_routing() -> None:
    losses = run_balanced("sft_live.py", smaller=5)
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 4


def test_a_layer_of_ones_own_learns_and_is_balanced_under_torchrun() -> None:
    losses = run_balanced("own_moe_layer.py", *TORCHRUN)
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2


@pytest.mark.nightly
def test_a_megatron_loop_learns_and_is_balanced_under_torchrun() -> None:
    losses = run_balanced("megatron_loop.py", *TORCHRUN)
    assert len(losses) == 4
    # Two updates on the same responses: the first one's ratios are 1, the second one's loss is lower.
    assert all(abs(first) < 1e-4 and second < -1e-3 for first, second in zip(losses[::2], losses[1::2], strict=True))


@pytest.mark.nightly
def test_a_trl_script_learns_and_is_balanced_under_torchrun() -> None:
    assert len(run_balanced("trl_grpo.py", *TORCHRUN)) == 6


def test_the_first_example_plans_a_trace_without_torch() -> None:
    path = ROOT / "example.py"
    program = (
        f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(path)!r}, run_name='__main__'); "
        "assert sys.modules['torch'] is None"
    )
    printed, table = run("-c", program).split("layer  static  planned\n")
    assert "AnalysisResult: trace in memory" in printed
    assert "PlanResult: trace in memory" in printed
    rows = [line.split() for line in table.splitlines()]
    assert [layer for layer, _, _ in rows] == ["0", "1", "2", "3"]
    assert all(float(planned) < 1.2 < 1.3 < float(static) for _, static, planned in rows)
