"""A stage of `trimtab doctor --gpu` on ranks of its own: hangs, crashes, warnings and findings of several ranks."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import trimtab.doctor.gpu
from helpers.interrupted import Interrupted
from trimtab.doctor.finding import Finding
from trimtab.doctor.gpu import stage_process
from trimtab.doctor.gpu.stage_process import Stage, StageResult, innermost_call, merge, run_stage
from trimtab.launch.launcher import has_ended
from trimtab.runtime.rows.exchange import exchange_rows

SHARED_MEMORY = Path("/dev/shm")


def leave_traces(folder: Path) -> None:
    (folder / f"process-{dist.get_rank()}").write_text(str(os.getpid()))
    (SHARED_MEMORY / f"trimtab-{os.getpid()}-doctor").write_bytes(b"left")


def hang_on_rank_1(folder: Path) -> list[Finding]:
    leave_traces(folder)
    if dist.get_rank() == 1:
        time.sleep(600)
    exchange_rows(torch.ones(2, 4), [1, 1], [1, 1], dist.distributed_c10d._get_default_group())
    return []


def kill_rank_1(folder: Path) -> list[Finding]:
    leave_traces(folder)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    time.sleep(600)
    return []


def leave_rank_0_alone(folder: Path) -> list[Finding]:
    leave_traces(folder)
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
        assert not [path for process in processes for path in SHARED_MEMORY.glob(f"trimtab-{process}-*")]
        assert all(map(has_ended, processes))
        assert not (folder / "stage").exists()
        assert result.status == "problem"
        if len(processes) == 2 and "had not joined" not in result.findings[-1].text:
            break
    return result, timeout_s


def dump_of(result: StageResult) -> str:
    return Path(result.findings[-1].text.rpartition("stacks and output: ")[2]).read_text()


def test_a_hang_is_a_result_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    result, timeout_s = run_and_find_nothing_left(hang_on_rank_1, tmp_path, 12, 60)
    (finding,) = result.findings
    assert finding.name == "hang"
    start = f"no result after {timeout_s} s, it was killed; rank 0 in _wait_for_rows (runtime/rows/exchange.py:"
    assert finding.text.startswith(start)
    assert "rank 1 in _on_rank (doctor/gpu/stage_process.py" in finding.text
    assert timeout_s <= result.seconds < timeout_s + 100
    of_rank = dump_of(result).split("---- ")
    assert re.match(r"rank 0 \(process \d+\)", of_rank[1])
    assert "in exchange_rows" in of_rank[1]
    assert "in hang_on_rank_1" in of_rank[2]
    assert "in exchange_rows" not in of_rank[2]


def test_a_crash_is_a_result_with_its_stack(tmp_path: Path) -> None:
    (finding,) = run_and_find_nothing_left(kill_rank_1, tmp_path, 100)[0].findings
    assert finding.name == "crash"
    assert re.match(r"rank 1 \(process \d+\) was killed by SIGABRT", finding.text)
    text = (tmp_path / "stage.txt").read_text()
    assert "Fatal Python error: Aborted" in text
    assert "in kill_rank_1" in text


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


def test_logged_warnings_are_findings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_process, "ENDING_S", 100.0)
    result = run_stage(Stage("stage", warn_on_rank_1, 100), 2, tmp_path)
    # Nothing waits for ranks that have ended.
    assert result.seconds < 100
    assert result.findings == (
        Finding("check", "ok", "text of rank 0"),
        Finding("log", "warning", "rank 1: messages are slow"),
    )
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().out == ""


def test_a_stage_that_is_interrupted_as_it_starts_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (ending,) = run_stage(Stage("stage", warn_on_rank_1, 100), Interrupted(2), tmp_path).findings
    assert ending.text.startswith(f"its process ended with exit status {-signal.SIGINT};")
    assert capfd.readouterr().err == ""


def test_the_innermost_call_is_that_of_the_main_thread() -> None:
    package = Path(trimtab.__file__).parent
    stacks = (
        f'Timeout (0:00:05)!\nThread 0x01 (most recent call first):\n  File "{package}/a.py", line 1 in other\n\n'
        f'Thread 0x02 (most recent call first):\n  File "/torch.py", line 2 in wait\n  File "{package}/b.py", line 3 '
        f'in <lambda>\n  File "{package}/sub/c.py", line 4 in inner\n  File "{package}/d.py", line 5 in outer\n'
    )
    assert innermost_call(stacks) == "in inner (sub/c.py:4)"
    assert innermost_call("") == "wrote no stack"


def test_findings_name_the_ranks_that_differ() -> None:
    both, one = Finding("both", "warning", "slow"), Finding("one", "problem", "wrong")
    merged = merge([[Finding("one", "ok", "0"), both, Finding("first", "warning", "x")], [one, both], [one, both]])
    of_two = Finding("one", "problem", "ranks 1, 2: wrong")
    assert merged == [Finding("one", "ok", "0"), both, Finding("first", "warning", "x"), of_two]
