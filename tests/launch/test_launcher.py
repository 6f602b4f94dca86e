"""A failed run leaves no processes and no shared memory, and the error names the cause."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed as dist

from helpers.interrupted import Interrupted, interrupt_here
from trimtab import shared_files
from trimtab.errors import InputError, RankFailedError
from trimtab.launch import launch, launcher
from trimtab.launch.launcher import Failure, Suspensions, is_suspended, raise_cause

SHARED_MEMORY = Path("/dev/shm")


def leave_segment(name: str) -> None:
    (SHARED_MEMORY / f"trimtab-{os.getpid()}-{name}").write_bytes(b"left")


def signal_rank_1_in_a_collective(name: str, number: signal.Signals) -> None:
    leave_segment(name)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    dist.barrier()


@pytest.mark.parametrize(
    ("number", "what"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "has been suspended for 2 s")]
)
def test_rank_killed_or_suspended_in_a_collective_is_named_and_its_files_are_removed(
    number: signal.Signals, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"test-{os.getpid()}"
    # The ranks have their own.
    monkeypatch.setattr(launcher, "TIMEOUT", timedelta(seconds=2))
    start = time.monotonic()
    with pytest.raises(RankFailedError, match=rf"rank 1 \(process \d+\) {what}; the run was stopped"):
        launch(signal_rank_1_in_a_collective, (name, number), ranks=2)
    # Far below the timeout of collectives.
    assert time.monotonic() - start < 200
    assert not list(SHARED_MEMORY.glob(f"trimtab-*-{name}"))


def do_nothing(_: object) -> None:
    pass


def test_ranks_that_are_starting_are_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even before they have imported anything: the launcher ends them, in one line."""
    # Processes in the background of a script ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        launch(do_nothing, (Interrupted(),), ranks=1)
        monkeypatch.setattr(BaseProcess, "start", lambda process: interrupt_here())
        with pytest.raises(KeyboardInterrupt):
            launch(do_nothing, (0,), ranks=1)
    finally:
        signal.signal(signal.SIGINT, before)


def failure(message: str, time: float, *, is_input: bool = False) -> Failure:
    return Failure(message, f"traceback of {message}\n", is_input, time)


def test_the_cause_is_the_killed_rank_or_the_first_to_raise(capsys: pytest.CaptureFixture[str]) -> None:
    raised = {0: failure("lost its peer", 7.0), 2: failure("broken", 5.0), 3: failure("lost its peer", 6.0)}
    exits: dict[int, tuple[int, int | None]] = {0: (10, 1), 1: (11, None), 2: (12, 1), 3: (13, 1)}
    with pytest.raises(RankFailedError, match="rank 2 failed: broken; the run was stopped"):
        raise_cause(exits, raised)
    assert capsys.readouterr().err == "traceback of broken\n"
    with pytest.raises(RankFailedError, match=r"rank 1 \(process 11\) was killed by SIGSEGV"):
        raise_cause(exits | {1: (11, -signal.SIGSEGV)}, raised)
    with pytest.raises(RankFailedError, match=r"rank 1 \(process 11\) ended with exit status 3"):
        raise_cause(exits | {1: (11, 3)}, raised)
    refused = raised | {3: failure("ranks don't divide experts", 9.0, is_input=True)}
    with pytest.raises(InputError, match=r"^ranks don't divide experts$"):
        raise_cause(exits | {1: (11, -signal.SIGKILL)}, refused)
    with (
        suspended_process() as process,
        pytest.raises(RankFailedError, match=rf"2 failed: broken; rank 1 \(process {process.pid}\) is suspended"),
    ):
        raise_cause(exits | {1: (process.pid, None)}, raised)


@contextmanager
def suspended_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            assert not is_suspended(process.pid)
            signal_and_wait(process, signal.SIGSTOP)
            yield process
        finally:
            process.kill()


def signal_and_wait(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    process.send_signal(number)
    wait_for(lambda: [process.pid] * (is_suspended(process.pid) == (number == signal.SIGSTOP)), 1)


def test_only_uninterrupted_suspension_counts() -> None:
    with suspended_process() as process:
        suspensions, pids = Suspensions(timedelta(seconds=3)), {0: os.getpid(), 1: process.pid}
        for _ in range(2):
            suspensions.add(pids, 1.0)
        signal_and_wait(process, signal.SIGCONT)
        suspensions.add(pids, 1.0)
        signal_and_wait(process, signal.SIGSTOP)
        for _ in range(2):
            suspensions.add(pids, 1.0)
        with pytest.raises(RankFailedError, match=rf"rank 1 \(process {process.pid}\) has been suspended for 3 s"):
            suspensions.add(pids, 1.0)


def test_environment_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_TEST_SET", "of the user")
    monkeypatch.delenv("TRIMTAB_TEST_UNSET", raising=False)
    before = dict(os.environ)
    with launcher._environment({"TRIMTAB_TEST_SET": "1", "TRIMTAB_TEST_UNSET": "2"}):
        assert os.environ == before | {"TRIMTAB_TEST_UNSET": "2"}
    assert os.environ == before


def test_shared_files_of_other_processes_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_files, "SHARED_MEMORY", tmp_path)
    for name in ("trimtab-12-0", "trimtab-12-7", "trimtab-123-0", "trimtab-1-12", "other-12-0"):
        (tmp_path / name).touch()
    shared_files.remove_shared_files(12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other-12-0", "trimtab-1-12", "trimtab-123-0"]
    assert len({shared_files.new_shared_file() for _ in range(3)}) == 3


def block_forever(name: str) -> None:
    leave_segment(name)
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.barrier()


def slow_read(name: str) -> str:
    leave_segment(name)
    time.sleep(2)
    return name


class SlowArgument:
    """An argument that takes seconds to unpickle."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return slow_read, (self.name,)


@contextmanager
def process_of(function: Callable[[], None]) -> Iterator[ForkProcess]:
    """A process of its own session that calls a function."""

    def lead_a_session() -> None:
        os.setsid()
        function()

    process = multiprocessing.get_context("fork").Process(target=lead_a_session)
    process.start()
    assert process.pid is not None
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def ranks_with_a_segment(name: str) -> list[int]:
    return [int(path.name.split("-")[1]) for path in SHARED_MEMORY.glob(f"trimtab-*-{name}")]


@pytest.mark.parametrize("when", ["it starts", "a rank is suspended"])
def test_ranks_end_with_a_launcher_that_is_killed(when: str) -> None:
    name = f"test-{os.getpid()}"
    argument = SlowArgument(name) if when == "it starts" else name
    with process_of(lambda: launch(block_forever, (argument,), ranks=2)) as running:
        ranks = wait_for(lambda: ranks_with_a_segment(name), 2)
        if when == "a rank is suspended":
            os.kill(ranks[1], signal.SIGSTOP)
        running.kill()
        running.join()
        wait_for(lambda: [rank for rank in ranks if not Path(f"/proc/{rank}").exists()], 2)
        assert not list(SHARED_MEMORY.glob(f"trimtab-*-{name}"))


def exchange_for_seconds(name: str) -> None:
    # Gloo counts the time in which a rank that waits for another one is suspended.
    group = dist.new_group(timeout=timedelta(minutes=1))
    leave_segment(name)
    for _ in range(40):
        dist.barrier(group)
        time.sleep(0.05)


def test_time_in_which_the_whole_run_is_suspended_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-Z. The launcher may look once when it goes on and a rank does not yet."""
    name = f"test-{os.getpid()}"
    monkeypatch.setattr(launcher, "TIMEOUT", timedelta(seconds=2))
    with process_of(lambda: launch(exchange_for_seconds, (name,), ranks=2)) as running:
        wait_for(lambda: ranks_with_a_segment(name), 2)
        assert running.pid is not None
        os.killpg(running.pid, signal.SIGSTOP)
        time.sleep(4)
        os.killpg(running.pid, signal.SIGCONT)
        running.join(60)
        assert running.exitcode == 0


def wait_for(find: Callable[[], list[int]], count: int) -> list[int]:
    deadline = time.monotonic() + 100
    while len(found := find()) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found
