"""`trimtab doctor`: no problem on a working machine, and a finding for every problem that it checks for."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from helpers.rank_tests import runs_on_ranks
from trimtab import ModelSpec, shared_files
from trimtab.cli.main import main
from trimtab.doctor import examination, self_check
from trimtab.doctor.examination import (
    check_allocator,
    check_backend,
    check_model,
    check_packages,
    check_processors,
    check_replicas,
    check_shared_memory,
    find_torch,
)
from trimtab.doctor.finding import Finding
from trimtab.doctor.self_check import PathCheck
from trimtab.errors import RankFailedError
from trimtab.launch.launcher import ALLOCATOR
from trimtab.runtime.transfer.mirror import NodeMirror
from trimtab.runtime.transfer.returns import GradientReturns

CONFIG = {
    "model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 4, "hidden_size": 100,
    "moe_intermediate_size": 50, "num_hidden_layers": 10,
}  # fmt: skip


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "config.json"


@pytest.fixture
def requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an installed Trimtab."""
    packages = [
        "numpy>=1.26",
        *(f"{each}; extra == 'train'" for each in ("torch>=2.10", "transformers>=5.4", "tokenizers")),
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: packages)


@pytest.fixture
def skip_slow_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "check_kernels", lambda: Finding("planning kernels", "ok", ""))
    monkeypatch.setattr(self_check, "check_paths", lambda ranks: [PathCheck("peer", 4, 1e-16)])


def test_working_machine_has_no_problem(
    requirements: None, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--model", str(config_file), "--json", str(tmp_path / "doctor.json")]) == 0
    assert "over the host path on 2 ranks" in capsys.readouterr().out
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert (report["schema"], report["ranks"], report["problems"]) == ("trimtab-doctor-1", 2, 0)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert found["micro-step"]["status"] == found["model family"]["status"] == "ok"
    assert "torch" in found["training packages"]["text"]
    assert found["experts"]["text"].startswith("16 of 32 experts a rank, 30.0 kB each")
    # 3 layers of 2 slots, 3 x 100 x 50 weights of 2 bytes; 10 layers of 32 experts.
    assert found["replica memory"]["text"].startswith("180 kB a rank for 2 slots in 3 layers; mirror at most 9.60 MB")


def test_without_torch_only_planning_and_options_of_megatron_are_checked(config_file: Path, tmp_path: Path) -> None:
    options = {"num_moe_experts": 32, "expert_model_parallel_size": 8, "fp8": "e4m3"}
    (tmp_path / "megatron.json").write_text(json.dumps(options))
    model = ["--model", str(config_file), "--ranks", "4", "--megatron", str(tmp_path / "megatron.json")]
    program = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch', 'transformers', 'tokenizers', 'megatron', 'yaml'):
            raise ModuleNotFoundError('absent', name=name)
sys.meta_path.insert(0, Absent())
from trimtab.cli.main import main
sys.exit(main(['doctor', '-q', *{model}]))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    # Nothing else is a problem.
    assert result.returncode == 1, result.stderr
    assert re.fullmatch(r"trimtab doctor: 1 of \d+ .* megatron fp8: fp8=e4m3 is not supported: .*\n", result.stderr)
    printed = " ".join(result.stdout.split())
    assert (
        "warning not installed: only planning is available; to train, pip install '.[train]' in Trimtab's checkout"
        in printed
    )
    assert "8 of 32 experts a rank" in printed
    assert "planning kernels ok" in printed
    assert "EP 8, TP 1, PP 1, CP 1" in printed
    assert "micro-step" not in printed


@pytest.mark.parametrize(
    ("model_type", "ranks", "message"),
    [
        ("qwen3_moe", "3", "experts: 3 ranks don't divide 32 experts"),
        ("llama", "2", "model family: 'llama' is not among qwen3_moe"),
    ],
)
def test_a_problem_gets_one_line_and_status_1(
    model_type: str, ranks: str, message: str, skip_slow_checks: None, config_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    config_file.write_text(json.dumps(CONFIG | {"model_type": model_type}))
    assert main(["doctor", "--model", str(config_file.parent), "--ranks", ranks]) == 1
    error = capsys.readouterr().err
    assert "trimtab doctor: 1 of " in error
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.nightly
@runs_on_ranks()
def test_the_micro_step_detects_a_broken_path() -> None:
    with mock.patch.object(GradientReturns, "_add"):
        assert self_check.check_path("peer").error > 1e-3
    with mock.patch.object(NodeMirror, "row", lambda self, layer, expert: next(iter(self._rows.values()))):
        assert self_check.check_path("host").error > 1e-3
        assert self_check.check_path("peer").error < 1e-12


def test_a_wrong_or_failed_micro_step_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = find_torch()[0]
    monkeypatch.setattr(self_check, "check_paths", lambda ranks: [PathCheck("peer", 4, 1e-3), PathCheck("host", 4, 0)])
    wrong, right = check_replicas(torch, 2, 2)
    assert (wrong.status, right.status) == ("problem", "ok")
    assert "4 replicas over the peer path on 2 ranks, float64: loss and gradients are off by 1e-03" in wrong.text

    def fail(ranks: int) -> list[PathCheck]:
        raise RankFailedError("rank 1 (process 7) was killed by SIGKILL; the run was stopped")

    monkeypatch.setattr(self_check, "check_paths", fail)
    (failed,) = check_replicas(torch, 2, 2)
    assert failed.status == "problem"
    assert "killed by SIGKILL" in failed.text


def test_a_micro_step_runs_on_all_ranks_of_the_run(skip_slow_checks: None) -> None:
    found = examination.examine(ranks=4, local_ranks=2, slots=2, model=None, num_layers=None)
    assert "over the peer path on 4 ranks" in found[-1].text


def test_old_and_missing_packages_are_named(requirements: None, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"numpy": "1.25.2", "torch": "2.10.0+cpu", "transformers": "5.3"}

    def version(package: str) -> str:
        if package == "tokenizers":
            raise importlib.metadata.PackageNotFoundError(package)
        return versions.get(package, "99.0")

    monkeypatch.setattr(importlib.metadata, "version", version)
    planning = check_packages("planning packages", None)
    assert planning.status == "problem"
    assert planning.text.startswith("numpy 1.25.2 is older than ")
    assert planning.text.endswith("; pip install . in Trimtab's checkout")
    training = check_packages("training packages", "train")
    assert training.status == "problem"
    assert "transformers 5.3 is older than 5.4" in training.text
    assert "tokenizers is missing" in training.text
    assert "torch" not in training.text
    # Those of planning are another check.
    assert "numpy" not in training.text


def test_shared_memory_is_written_and_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared_files, "SHARED_MEMORY", tmp_path / "absent")
    assert check_shared_memory().status == "problem"
    monkeypatch.setattr(shared_files, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shared_files, "free_shared_memory", lambda: 64 << 20)
    warning = check_shared_memory()
    assert warning.status == "warning"
    assert "has 67.1 MB free" in warning.text
    monkeypatch.setattr(shared_files, "free_shared_memory", lambda: 64 << 30)
    assert check_shared_memory().status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_mirror_that_may_not_fit_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelSpec("qwen3_moe", 32, 4, 100, 50)
    monkeypatch.setattr(shared_files, "free_shared_memory", lambda: 9_599_999)
    assert check_model(model, 10, ranks=2, slots=2, trains=True)[-1].status == "warning"
    monkeypatch.setattr(shared_files, "free_shared_memory", lambda: 9_600_000)
    assert check_model(model, 10, ranks=2, slots=2, trains=True)[-1].status == "ok"


def test_warnings_are_no_problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, skip_slow_checks: None) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    slow = Finding("GPU variables", "warning", "slow")
    monkeypatch.setattr(examination, "check_gpu_variables", lambda torch: [slow])
    assert main(["doctor", "--ranks", "3", "--json", str(tmp_path / "d.json")]) == 0
    report = json.loads((tmp_path / "d.json").read_text())
    statuses = {finding["name"]: finding["status"] for finding in report["findings"]}
    assert (report["problems"], statuses["processors"], statuses["GPU variables"]) == (0, "warning", "warning")


def test_under_torchrun_the_allocator_settings_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", *ALLOCATOR):
        monkeypatch.delenv(name, raising=False)
    assert check_allocator().status == "ok"
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert "with torchrun, set GLIBC_TUNABLES=glibc" in check_allocator().text
    for name, value in ALLOCATOR.items():
        monkeypatch.setenv(name, f"glibc.malloc.perturb=1:{value}")
    assert check_allocator().status == "ok"


def test_too_few_devices_or_cores_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, get_device_name=lambda _: "GPU")
    yes = SimpleNamespace(is_available=lambda: True, is_gloo_available=lambda: True, is_nccl_available=lambda: True)
    torch = SimpleNamespace(cuda=cuda, distributed=yes)
    assert check_backend(torch, 2).status == "problem"
    assert check_backend(torch, 1).status == "ok"
    (skipped,) = check_replicas(torch, 2, 2)
    assert skipped.status == "warning"
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert check_processors(3).status == "warning"
    assert check_processors(2).status == "ok"
