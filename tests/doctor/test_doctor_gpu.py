"""`trimtab doctor --gpu` without a GPU: its command, its verdicts, hangs and crashes of stages, wrong variables."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trimtab.cli.main import main
from trimtab.cluster import ClusterSpec
from trimtab.doctor import gpu_environment, gpu_examination, gpu_stages
from trimtab.doctor.examination import check_gpu_variables
from trimtab.doctor.finding import Finding, Status
from trimtab.doctor.gpu_environment import check_numa, check_peer_access
from trimtab.doctor.gpu_examination import StageResult, examine_gpus, merge, run_stage, verdict
from trimtab.doctor.gpu_stages import check_equality, compare_rate
from trimtab.doctor.self_check import PathCheck
from trimtab.errors import InputError
from trimtab.runtime.program.exchange import exchange_rows
from trimtab.runtime.transfer.peer_memory import Place

SHARED_MEMORY = Path("/dev/shm")


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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(gpu_examination, "versions", dict)
    by_name = {result.name: result for result in results}
    monkeypatch.setattr(gpu_examination, "STAGES", by_name)
    monkeypatch.setattr(gpu_examination, "run_stage", lambda name, check, ranks: check)
    assert main(["doctor", "--gpu", "--json", str(tmp_path / "gpu.json")]) == status
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].rstrip() == "trimtab doctor --gpu, 2 ranks"
    assert printed.splitlines()[-1] == line
    figures = json.loads((tmp_path / "gpu.json").read_text())
    assert (figures["schema"], figures["verdict"], figures["status"]) == ("trimtab-doctor-gpu-1", line, status)
    assert [stage["name"] for stage in figures["stages"]] == [*by_name]


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


def hang_on_rank_1() -> list[Finding]:
    (SHARED_MEMORY / f"trimtab-{os.getpid()}-doctor-test").write_bytes(b"left")
    if dist.get_rank() == 1:
        time.sleep(600)
    exchange_rows(torch.ones(2, 4), [1, 1], [1, 1], dist.distributed_c10d._get_default_group())
    return []


def kill_rank_1() -> list[Finding]:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    time.sleep(600)
    return []


def leave_rank_0_alone() -> list[Finding]:
    if dist.get_rank() == 0:
        dist.barrier()
    return [Finding("cause", "problem", "stopped here")]


def warn_on_rank_1() -> list[Finding]:
    if dist.get_rank() == 1:
        logging.getLogger("trimtab").warning("messages are %s", "slow")
    return [Finding("check", "ok", f"text of rank {dist.get_rank()}")]


def test_a_hang_is_a_finding_and_stacks_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (finding,) = run_stage("stage", hang_on_rank_1, 2, timeout_s=5).findings
    assert (finding.name, finding.text) == ("hang", "no result after 5 s; the stacks of all ranks are printed")
    _, first, second = capsys.readouterr().err.split("---- ")
    assert first.startswith("rank 0, stage stage\n")
    assert "in exchange_rows" in first
    assert "in hang_on_rank_1" in second
    assert "in exchange_rows" not in second
    assert not list(SHARED_MEMORY.glob("trimtab-*-doctor-test"))


def test_a_crash_is_a_finding_after_its_cause(capsys: pytest.CaptureFixture[str]) -> None:
    (finding,) = run_stage("stage", kill_rank_1, 2).findings
    assert finding.name == "crash"
    assert "was killed by SIGABRT" in finding.text
    assert "Fatal Python error: Aborted" in capsys.readouterr().err
    cause, ending = run_stage("stage", leave_rank_0_alone, 2).findings
    assert (cause.text, ending.name) == ("rank 1: stopped here", "crash")
    assert "rank 0 failed: " in ending.text


def test_logged_warnings_are_findings() -> None:
    assert run_stage("stage", warn_on_rank_1, 2).findings == (
        Finding("check", "ok", "text of rank 0"),
        Finding("log", "warning", "rank 1: messages are slow"),
    )


def test_findings_name_the_ranks_that_differ() -> None:
    both, one = Finding("both", "warning", "slow"), Finding("one", "problem", "wrong")
    merged = merge([[Finding("one", "ok", "0"), both, Finding("first", "warning", "x")], [one, both], [one, both]])
    of_two = Finding("one", "problem", "ranks 1, 2: wrong")
    assert merged == [Finding("one", "ok", "0"), both, Finding("first", "warning", "x"), of_two]


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


def test_peer_access_is_that_of_the_ranks_gpus_by_uuid() -> None:
    places = [Place("host", uuid, 0) for uuid in "abc"]
    assert check_peer_access(places, 0, {"b": True, "c": True}).text == "all 3 GPUs read each other's memory"
    closed = check_peer_access(places, 0, {"b": True, "c": False})
    assert closed.status == "warning"
    assert "GPUs of ranks 2;" in closed.text
    assert check_peer_access(places, 0, {"b": True}).text.startswith("1 GPU of other ranks not visible")
    assert check_peer_access([*places, places[0]], 0, {"b": True, "c": True}).status == "problem"


def test_cores_of_another_numa_node_are_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 9})
    monkeypatch.setattr(gpu_environment, "NODES", tmp_path)
    for node, cores in enumerate(("0-3,9", "5-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores)
    statuses = []
    for text in ("0\n", "1\n", "-1\n"):
        (tmp_path / "numa_node").write_text(text)
        statuses.append(check_numa(tmp_path / "numa_node").status)
    assert statuses == ["ok", "warning", "ok"]


def test_less_than_half_of_the_expected_rate_is_a_limit_with_both_figures() -> None:
    cluster = ClusterSpec(8, 8, host_bytes_per_s=60e9, name="gpus")
    assert compare_rate("host path", 31e9, cluster).status == "ok"
    finding = compare_rate("host path", 29e9, cluster)
    assert finding.status == "warning"
    assert finding.text.startswith("29.0 GB/s, where 60.0 GB/s is expected of gpus")
    assert compare_rate("host path", 1.0, None).status == "ok"


def test_messages_in_place_of_peer_memory_are_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(path: str, *_: Any, **__: Any) -> PathCheck:
        return PathCheck(path, 4, 0.0, reads_peers=False)

    monkeypatch.setattr(gpu_stages, "check_path", check)
    monkeypatch.setattr(gpu_stages, "Topology", SimpleNamespace(build=lambda *_: SimpleNamespace(control=None)))
    monkeypatch.setattr(gpu_stages, "dist", SimpleNamespace(get_world_size=lambda: 2, barrier=lambda group: None))
    findings = check_equality()
    assert [finding.status for finding in findings] == ["ok", "warning", "ok", "ok"] * 2
    assert "sent as messages" in findings[1].text
