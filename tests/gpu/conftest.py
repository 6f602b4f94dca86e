"""What only GPUs can show: run `python -m pytest tests/gpu --json gpu.json` on a machine with GPUs.

Each test runs a stage: a function that returns findings, on ranks of its own with a GPU each. A problem fails the test.
The last line is the verdict, as of `trimtab doctor --gpu`. `--device cpu` runs the stages small on two CPU ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from trimtab.doctor.gpu_examination import Check, StageResult

Run = Callable[..., None]
RESULTS: pytest.StashKey[list[StageResult]] = pytest.StashKey()
RANKS: pytest.StashKey[int] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options; pytest reads them if this folder is on its command line."""
    parser.addoption("--json", type=Path, dest="gpu_json", help="write the findings of tests/gpu to FILE")
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="of the stages of tests/gpu")
    parser.addoption("--ranks", type=int, dest="gpu_ranks", help="ranks of tests/gpu (default: all GPUs; 2 on a CPU)")


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs from torch for `--device cpu`."""
    config.stash[RESULTS] = []
    if config.getoption("--device", "cuda") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a stage, and fails if it finds a problem. Arguments are those of `run_stage`, without the ranks."""
    import torch

    from trimtab.doctor.gpu_examination import TIMEOUT_S, run_stage

    config = request.config
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_cpu = config.getoption("--device", "cuda") == "cpu"
    if not gpus and not on_cpu:
        pytest.skip("no GPU; --device cpu runs this small on CPU ranks")
    ranks = config.stash[RANKS] = config.getoption("gpu_ranks", None) or gpus or 2
    # Sessions that check sampled weights wait for the device.
    monkeypatch.delenv("TRIMTAB_VERIFY_WEIGHTS", raising=False)

    def run(name: str, check: Check, timeout_s: float = TIMEOUT_S) -> None:
        result = run_stage(name, check, ranks, timeout_s)
        config.stash[RESULTS].append(result)
        assert [finding for finding in result.findings if finding.status == "problem"] == []

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the findings and the verdict, and writes them to the file of `--json`."""
    if not (results := config.stash.get(RESULTS, [])):
        return
    from trimtab.doctor.gpu_examination import figures_of
    from trimtab.files import write_json

    figures = figures_of(results, config.stash[RANKS])
    if file := config.getoption("gpu_json", None):
        write_json(file, figures)
    for result in results:
        for finding in result.findings:
            terminalreporter.write_line(f"{result.name}, {finding.name}: {finding.status}: {finding.text}")
    where = "" if figures["gpus"] else " (on the CPU, without a GPU)"
    terminalreporter.write_line(f"{figures['verdict']}{where}", bold=True)
