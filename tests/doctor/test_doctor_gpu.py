"""`trimtab doctor --gpu` on a CPU: stages, hangs and crashes as results, verdicts, and the tables of docs/gpu.md."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import trimtab.doctor.gpu
from helpers.rank_pool import on_ranks
from trimtab.cli.main import main
from trimtab.cluster import ClusterSpec, ModelSpec
from trimtab.doctor import examination
from trimtab.doctor.finding import Finding, Status
from trimtab.doctor.gpu import (
    bandwidth_stage,
    equality_stage,
    gpu_examination,
    mirror_stage,
    rewriting_stage,
    soak_stage,
)
from trimtab.doctor.gpu.environment_stage import NO_GPU, check_peer_access
from trimtab.doctor.gpu.gpu_examination import STAGES, GpuExamination, examine_gpus
from trimtab.doctor.gpu.layer_estimate import estimate_layer, estimate_replica, estimate_tables
from trimtab.doctor.gpu.layer_stage import describe_layer
from trimtab.doctor.gpu.mirror_stage import describe_mirror
from trimtab.doctor.gpu.stage_process import Stage, StageResult, innermost_call, merge, run_stage
from trimtab.doctor.gpu.synchronisation_stage import check_synchronisation, find_wait
from trimtab.doctor.gpu.verdict import verdict
from trimtab.doctor.machine import check_gpu_variables
from trimtab.doctor.self_check import PathCheck
from trimtab.errors import InputError
from trimtab.launch.suspension import has_ended
from trimtab.runtime.layer.layer import ExpertLayer
from trimtab.runtime.rows.exchange import exchange_rows
from trimtab.runtime.transfer import message_rounds
from trimtab.runtime.transfer.mirror import NodeMirror
from trimtab.runtime.transfer.peer_memory import PeerMemory, Place
from trimtab.runtime.transfer.returns import GradientReturns

SHARED_MEMORY = Path("/dev/shm")
DOCS = Path(__file__).parents[2] / "docs"
CPU = torch.device("cpu")


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_stage_passes_on_two_ranks(stage: Stage) -> None:
    for rank, findings in enumerate(on_ranks(stage.run, ranks=2)):
        assert findings
        unusual = [finding for finding in findings if finding.status != "ok"]
        assert unusual == ([Finding("device", "warning", NO_GPU)] if stage.name == "environment" else []), rank


def test_all_links_are_measured() -> None:
    (stage,) = (stage for stage in STAGES if stage.name == "bandwidth")
    names = [finding.name for finding in on_ranks(stage.run, ranks=2)[0]]
    assert names == ["host path", "copy-engine pulls", "messages", "all-to-all"]


def leave_shared_memory() -> None:
    (SHARED_MEMORY / f"trimtab-{os.getpid()}-doctor").write_bytes(b"left")


def write_process(folder: Path) -> None:
    (folder / f"process-{dist.get_rank()}").write_text(str(os.getpid()))


def hang_on_rank_1(folder: Path) -> list[Finding]:
    write_process(folder)
    leave_shared_memory()
    if dist.get_rank() == 1:
        time.sleep(600)
    exchange_rows(torch.ones(2, 4), [1, 1], [1, 1], dist.distributed_c10d._get_default_group())
    return []


def kill_rank_1(folder: Path) -> list[Finding]:
    write_process(folder)
    leave_shared_memory()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    time.sleep(600)
    return []


def leave_rank_0_alone(folder: Path) -> list[Finding]:
    write_process(folder)
    if dist.get_rank() == 0:
        dist.barrier()
    return [Finding("cause", "problem", "stopped here")]


def run_and_find_nothing_left(
    function: Callable[[Path], list[Finding]], folder: Path, *timeouts_s: float
) -> tuple[StageResult, float]:
    """The result, and its timeout: a longer one where the machine was too busy to start the ranks in the first."""
    for timeout_s in timeouts_s:
        result = run_stage(Stage("stage", partial(function, folder), timeout_s), 2, folder)
        processes = [int(path.read_text()) for path in folder.glob("process-*")]
        left = [path for process in processes for path in SHARED_MEMORY.glob(f"trimtab-{process}-*")]
        for path in left:
            path.unlink()
        assert not left
        assert all(map(has_ended, processes))
        assert not (folder / "stage").exists()
        assert result.status == "problem"
        if len(processes) == 2 and "had not joined" not in result.findings[-1].text:
            break
    return result, timeout_s


def dump_of(result: StageResult) -> str:
    return Path(result.findings[-1].text.rpartition("stacks and output: ")[2]).read_text()


@pytest.mark.slow
def test_a_hang_is_a_result_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    result, timeout_s = run_and_find_nothing_left(hang_on_rank_1, tmp_path, 25, 60)
    (finding,) = result.findings
    assert finding.name == "hang"
    start = f"no result after {timeout_s} s, it was killed; rank 0 in _wait_for_rows (runtime/rows/exchange.py:"
    assert finding.text.startswith(start)
    assert "rank 1 in _on_rank (doctor/gpu/stage_process.py" in finding.text
    assert timeout_s <= result.seconds < timeout_s + 15
    of_rank = dump_of(result).split("---- ")
    assert re.match(r"rank 0 \(process \d+\)", of_rank[1])
    assert "in exchange_rows" in of_rank[1]
    assert "in hang_on_rank_1" in of_rank[2]
    assert "in exchange_rows" not in of_rank[2]


@pytest.mark.slow
def test_a_crash_is_a_result_with_its_stack(tmp_path: Path) -> None:
    (finding,) = run_and_find_nothing_left(kill_rank_1, tmp_path, 100)[0].findings
    assert finding.name == "crash"
    assert re.match(r"rank 1 \(process \d+\) was killed by SIGABRT", finding.text)
    text = (tmp_path / "stage.txt").read_text()
    assert "Fatal Python error: Aborted" in text
    assert "in kill_rank_1" in text


@pytest.mark.slow
def test_what_a_rank_found_before_others_failed_comes_first(tmp_path: Path) -> None:
    cause, ending = run_and_find_nothing_left(leave_rank_0_alone, tmp_path, 100)[0].findings
    assert (cause.name, ending.name) == ("cause", "crash")
    assert cause.text == "rank 1: stopped here"
    assert "rank 0 failed: " in ending.text
    assert "Traceback" in dump_of(StageResult("", (ending,), 0.0))


def warn_on_rank_1() -> list[Finding]:
    import logging

    if dist.get_rank() == 1:
        logging.getLogger("trimtab").warning("messages are slow")
    print("not for the terminal")
    return [Finding("check", "ok", f"text of rank {dist.get_rank()}")]


@pytest.mark.slow
def test_logged_warnings_are_findings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = run_stage(Stage("stage", warn_on_rank_1, 100), 2, tmp_path)
    assert result.findings == (
        Finding("check", "ok", "text of rank 0"),
        Finding("log", "warning", "rank 1: messages are slow"),
    )
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().out == ""


def test_the_innermost_call_is_that_of_the_main_thread() -> None:
    package = Path(trimtab.__file__).parent
    stacks = (
        f'Timeout (0:00:05)!\nThread 0x01 (most recent call first):\n  File "{package}/a.py", line 1 in other\n\n'
        f'Thread 0x02 (most recent call first):\n  File "/torch.py", line 2 in wait\n  File "{package}/b.py", line 3 '
        f'in <lambda>\n  File "{package}/sub/c.py", line 4 in inner\n  File "{package}/d.py", line 5 in outer\n'
    )
    assert innermost_call(stacks) == "in inner (sub/c.py:4)"
    assert innermost_call("") == "wrote no stack"


def found(name: str, status: Status, text: str = "") -> Finding:
    return Finding(name, status, text)


def test_findings_name_the_ranks_that_differ() -> None:
    both, one = found("both", "warning", "slow"), found("one", "problem", "wrong")
    merged = merge([[found("one", "ok", "0"), both, found("first", "warning", "x")], [one, both], [one, both]])
    assert merged == [
        found("one", "ok", "0"),
        both,
        found("first", "warning", "x"),
        found("one", "problem", "ranks 1, 2: wrong"),
    ]


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
    results: tuple[StageResult, ...],
    line: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert verdict(results) == (line, status)
    asked = []

    def examine(ranks: int | None) -> GpuExamination:
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


def test_under_torchrun_it_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--gpu"]) == 2
    error = capsys.readouterr().err
    assert (
        error == "trimtab doctor: --gpu starts its own ranks, to stop them where they hang; run it without torchrun\n"
    )


def test_other_checks_and_wrong_numbers_of_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--gpu", "--model", "qwen"]) == 2
    assert "--model: --gpu does not check it" in capsys.readouterr().err
    assert main(["doctor", "--gpu", "--ranks", "1"]) == 2
    assert "--ranks is 1; without a GPU, experts are shared by 2 or more" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(InputError, match="--ranks is 5; every rank needs a GPU of its own, and there are 4"):
        examine_gpus(5)


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


def rewrite_without_writing() -> None:
    with mock.patch.object(PeerMemory, "fill"):
        (finding,) = rewriting_stage.check_rewriting()
    assert finding.status == "problem"


def refresh_once() -> None:
    refresh, calls = NodeMirror.refresh, itertools.count()
    with mock.patch.object(NodeMirror, "refresh", lambda *args: 0 if next(calls) else refresh(*args)):
        (finding,) = mirror_stage.check_mirror()
    assert finding.status == "problem"
    assert finding.text.startswith("2000 of 4000 entries are wrong")


def soak_with_rows_that_stay() -> None:
    with (
        mock.patch.object(soak_stage, "CPU_SECONDS", 0.1),
        mock.patch.object(soak_stage, "exchange_rows", lambda rows, *_, **__: rows),
    ):
        (finding,) = soak_stage.check_soak()
    assert finding.status == "problem"


def soak_that_sends_old_values() -> None:
    def earlier(messages: Any, *args: Any, **kwargs: Any) -> Any:
        sent = [each._replace(tensor=each.tensor - 1) if each.sender == args[0] else each for each in messages]
        return message_rounds.post(sent, *args, **kwargs)

    with mock.patch.object(soak_stage, "CPU_SECONDS", 0.1), mock.patch.object(soak_stage, "post", earlier):
        (finding,) = soak_stage.check_soak()
    assert finding.status == "problem"


def lose_gradients_in_bfloat16() -> None:
    with mock.patch.object(GradientReturns, "_add"):
        findings = equality_stage.check_equality()
    assert {finding.status for finding in findings} == {"problem"}
    assert len(findings) == 6


def wait_in_every_layer() -> None:
    def check_shapes(self: ExpertLayer, hidden: torch.Tensor, *_: Any) -> None:
        # As counts that are read on the host.
        hidden.sum().item()

    with mock.patch.object(ExpertLayer, "_check_shapes", check_shapes):
        findings = check_synchronisation()
    assert findings[-1].status == "problem"
    assert "_local_scalar_dense" in findings[-1].text


@pytest.mark.parametrize(
    "broken",
    [
        rewrite_without_writing,
        refresh_once,
        soak_with_rows_that_stay,
        soak_that_sends_old_values,
        lose_gradients_in_bfloat16,
        wait_in_every_layer,
    ],
)
def test_stages_find_what_is_broken(broken: Callable[[], None]) -> None:
    on_ranks(broken, ranks=2)


def peers_of_equality() -> None:
    def check(path: str, *_: Any, **__: Any) -> PathCheck:
        return PathCheck(path, 4, 0.0, reads_peers=False)

    with mock.patch.object(equality_stage, "check_path", check):
        findings = equality_stage.check_equality()
    assert [finding.status for finding in findings] == ["ok", "warning", "ok", "ok"] * 2
    assert "sent as messages" in findings[1].text


def test_messages_in_place_of_peer_memory_are_a_limit() -> None:
    on_ranks(peers_of_equality, ranks=2)


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.nonzero, lambda x: bool(x > 1), lambda x: x[x > 0]])
def test_reading_a_value_is_a_wait(read: Callable[[torch.Tensor], object]) -> None:
    assert find_wait(lambda: torch.ones(4) @ torch.ones(4), CPU) is None
    place = find_wait(lambda: read(torch.ones(1)), CPU)
    assert place is not None
    assert place.startswith("test_doctor_gpu.py:")


def test_less_than_half_of_the_expected_rate_is_a_limit_with_both_figures() -> None:
    cluster = ClusterSpec(8, 8, host_bytes_per_s=60e9, name="gpus")
    assert bandwidth_stage.compare_rate("host path", 31e9, cluster).status == "ok"
    finding = bandwidth_stage.compare_rate("host path", 29e9, cluster)
    assert finding.status == "warning"
    assert finding.text.startswith("29.0 GB/s, where 60.0 GB/s is expected of gpus")
    assert bandwidth_stage.compare_rate("host path", 1.0, None).status == "ok"


@pytest.mark.parametrize(
    ("gpu", "preset"),
    [("NVIDIA H200", "h200x8"), ("NVIDIA B200", "b200x8"), ("NVIDIA H100 80GB HBM3", "h100x8"), ("NVIDIA L40S", None)],
)
def test_rates_are_expected_of_known_gpus_only(gpu: str, preset: str | None) -> None:
    cluster = bandwidth_stage.cluster_of(gpu, 4)
    assert (cluster and cluster.name) == preset


def test_a_layer_that_takes_twice_its_estimate_is_a_limit() -> None:
    expected = {"dispatch": 1e-3, "experts": 2e-3}
    measured = {"dispatch": 1e-3, "experts": 4.9e-3, "waiting": 9.0}
    finding = describe_layer("4,096 tokens", measured, expected)
    assert finding.status == "ok"
    assert "experts 4.90 ms (estimate 2.00 ms)" in finding.text
    assert "together 5.90 ms (estimate 3.00 ms)" in finding.text
    assert describe_layer("", measured | {"dispatch": 1.2e-3}, expected).status == "warning"
    assert describe_layer("", measured, {}).status == "ok"


def test_mirrors_that_are_wrong_or_not_pinned() -> None:
    statuses = [
        describe_mirror(wrong, pinned=pinned, sent=1, taken_s=1.0, nodes=2).status
        for wrong, pinned in ((0, True), (0, False), (1, True))
    ]
    assert statuses == ["ok", "warning", "problem"]


def test_peer_access_is_that_of_the_ranks_gpus_by_uuid() -> None:
    places = [Place("host", uuid, 0) for uuid in "abc"]
    assert check_peer_access(places, 0, {"b": True, "c": True}).text == "all 3 GPUs read each other's memory"
    closed = check_peer_access(places, 0, {"b": True, "c": False})
    assert closed.status == "warning"
    assert "GPUs of ranks 2;" in closed.text
    assert check_peer_access(places, 0, {"b": True}).text.startswith("1 GPU of other ranks not visible")
    assert check_peer_access([*places, places[0]], 0, {"b": True, "c": True}).status == "problem"


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
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    unordered, slow = check_gpu_variables(fake_torch((2, 27, 3)))
    assert (unordered.status, slow.status) == ("problem", "warning")
    assert "set NCCL_LAUNCH_ORDER_IMPLICIT=1" in unordered.text


def test_doctor_without_gpu_option_shows_wrong_variables_too(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = found("GPU variables", "warning", "slow")
    monkeypatch.setattr(examination, "check_gpu_variables", lambda torch: [wrong])
    monkeypatch.setattr(examination, "check_kernels", lambda: found("planning kernels", "ok"))
    monkeypatch.setattr(examination, "check_replicas", lambda *_: [])
    assert wrong in examination.examine(ranks=2, local_ranks=2, slots=2, model=None, num_layers=None)


def test_the_tables_of_the_page_are_the_estimates() -> None:
    assert estimate_tables() in (DOCS / "gpu.md").read_text()


def test_an_estimate_is_bytes_by_rate() -> None:
    """16 tokens with 2 rows each on 4 ranks: 24 rows leave the rank, of 10 values of 2 bytes."""
    model = ModelSpec("m", 8, 2, hidden_size=10, expert_width=5)
    cluster = ClusterSpec(
        4, 4, expert_flops=1e9, node_bytes_per_s=1e7, host_bytes_per_s=2e6, dispatch_node_bytes_per_s=48e5,
        dispatch_s=1e-3, tile_rows=1, copy_s=0.0, memory_bytes_per_s=1e12, expert_backward=2.0,
    )  # fmt: skip
    parts = {part.name: part for part in estimate_layer(cluster, model, 16)}
    assert parts["dispatch"].amount == parts["combine, backward"].amount == 480
    assert parts["dispatch"].seconds == pytest.approx(1e-3 + 480 / 48e5)
    # An expert has 3 x 10 x 5 weights, a multiplication and an addition each; 32 rows, from 32 of all ranks' 128.
    assert parts["experts"].amount == 32 * 300
    assert parts["experts"].seconds == pytest.approx(32 * 300 / 1e9, rel=1e-3)
    assert parts["experts, backward"].seconds == pytest.approx(2 * parts["experts"].seconds)
    peer, host, gradient = estimate_replica(cluster, model)
    assert (peer.seconds, host.seconds, gradient.seconds) == pytest.approx((300 / 1e7, 300 / 2e6, 600 / 1e7))
