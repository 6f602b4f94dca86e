"""`trimtab doctor --gpu` on a CPU: its command, its verdicts, wrong variables."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trimtab.doctor.gpu
from trimtab.cli.main import main
from trimtab.cluster import ClusterSpec, ModelSpec
from trimtab.doctor.examination import check_gpu_variables
from trimtab.doctor.finding import Finding, Status
from trimtab.doctor.gpu import gpu_examination
from trimtab.doctor.gpu.gpu_examination import GpuExamination, examine_gpus, verdict
from trimtab.doctor.gpu.micro_step_stages import estimate_layer
from trimtab.doctor.gpu.stage_process import Stage, StageResult
from trimtab.errors import InputError

CPU = torch.device("cpu")


def found(name: str, status: Status, text: str = "") -> Finding:
    return Finding(name, status, text)


GOOD = StageResult("a", (found("x", "ok"),), 1.0)
LIMITED = StageResult("b", (found("x", "ok"), found("y", "warning", "slow"), found("z", "warning", "old")), 1.0)
BAD = StageResult("c", (found("x", "warning"), found("y", "problem", "wrong")), 1.0)


@pytest.mark.parametrize(
    ("results", "line", "status"),
    [
        ((GOOD, GOOD), "GO", 0),
        ((GOOD, LIMITED), "GO WITH LIMITS: b, y: slow", 3),
        ((LIMITED, BAD, GOOD), "NO GO: c, y: wrong", 1),
    ],
)
def test_the_verdict_names_the_first_finding_and_is_the_exit_status(
    results: tuple[StageResult, ...], line: str, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert verdict(results) == (line, status)
    asked = []

    def examine(ranks: int | None, *, full: bool) -> GpuExamination:
        assert not full
        asked.append(ranks)
        return GpuExamination(2, False, results)

    monkeypatch.setattr(trimtab.doctor.gpu, "examine_gpus", examine)
    assert main(["doctor", "--gpu", "--ranks", "2", "--json", str(tmp_path / "gpu.json")]) == status
    assert asked == [2]
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].rstrip() == "trimtab doctor --gpu, no GPU was tested: 2 ranks on the CPU"
    assert printed.splitlines()[-1] == line
    figures = json.loads((tmp_path / "gpu.json").read_text())
    assert (figures["schema"], figures["verdict"], figures["status"]) == ("trimtab-doctor-gpu-1", line, status)
    assert [stage["name"] for stage in figures["stages"]] == [result.name for result in results]


def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)


def test_torchrun_and_wrong_numbers_of_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        under_torchrun(patch)
        assert main(["doctor", "--gpu"]) == 2
    assert "run it without torchrun" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(InputError, match="--ranks is 5; every rank needs a GPU of its own, and there are 4"):
        examine_gpus(5)
    assert examine_gpus(4, []) == examine_gpus(None, []) == GpuExamination(4, True, ())


def test_stages_share_a_budget_and_the_folder_stays_only_for_dumps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(gpu_examination, "BUDGET_S", 40.0)
    given: list[tuple[int, float]] = []

    def run(stage: Stage, ranks: int, folder: Path) -> StageResult:
        given.append((ranks, stage.timeout_s))
        assert folder.is_dir()
        if stage.name == "last":
            monkeypatch.setattr(time, "monotonic", lambda: 1e12)
        return StageResult(stage.name, (found("x", "ok"),), 1.0)

    monkeypatch.setattr(gpu_examination, "run_stage", run)
    stages = [Stage(name, list, seconds) for name, seconds in (("short", 5), ("last", 90), ("late", 5))]
    examined = examine_gpus(None, stages)
    assert [ranks for ranks, _ in given] == [2, 2]
    assert given[0][1] == 5
    assert given[1][1] < 40
    assert examined.results[2].findings == (found("time", "problem", "not run: the stages before it took 40 s"),)
    assert list(tmp_path.iterdir()) == []


def fake_torch(nccl: tuple[int, ...], *, available: bool = True) -> Any:
    cuda = SimpleNamespace(is_available=lambda: available, nccl=SimpleNamespace(version=lambda: nccl))
    return SimpleNamespace(cuda=cuda, distributed=SimpleNamespace(is_nccl_available=lambda: True))


def test_wrong_variables_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "NCCL_LAUNCH_ORDER_IMPLICIT", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    assert check_gpu_variables(fake_torch((2, 27, 3), available=False)) == []
    # Ranks that trimtab starts get the order.
    assert [finding.status for finding in check_gpu_variables(fake_torch((2, 27, 3)))] == ["ok"]
    (old,) = check_gpu_variables(fake_torch((2, 25, 1)))
    assert old.status == "problem"
    assert "NCCL 2.25.1" in old.text
    under_torchrun(monkeypatch)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    unordered, slow = check_gpu_variables(fake_torch((2, 27, 3)))
    assert (unordered.status, slow.status) == ("problem", "warning")
    assert "set NCCL_LAUNCH_ORDER_IMPLICIT=1" in unordered.text


def test_an_estimate_is_bytes_by_rate() -> None:
    """16 tokens with 2 rows each on 4 ranks: 24 rows leave the rank, of 10 values of 2 bytes."""
    model = ModelSpec("m", 8, 2, hidden_size=10, expert_width=5)
    cluster = ClusterSpec(
        4, 4, expert_flops=1e9, node_bytes_per_s=1e7, host_bytes_per_s=2e6, dispatch_node_bytes_per_s=48e5,
        dispatch_s=1e-3, tile_rows=1, copy_s=0.0, memory_bytes_per_s=1e12, expert_backward=2.0,
    )  # fmt: skip
    parts = estimate_layer(cluster, model, 16)
    assert parts["dispatch"] == parts["combine, backward"] == pytest.approx(1e-3 + 480 / 48e5)
    # An expert has 3 x 10 x 5 weights, a multiplication and an addition each; 32 rows, from 32 of all ranks' 128.
    assert parts["experts"] == pytest.approx(32 * 300 / 1e9, rel=1e-3)
    assert parts["experts, backward"] == pytest.approx(2 * parts["experts"])
