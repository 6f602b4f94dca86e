"""A failed run leaves no processes and no shared memory, and the error names the cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from trimtab.errors import InputError, RankFailedError
from trimtab.launch import launch, launcher, shared_files
from trimtab.launch.launcher import Failure, raise_cause

SHARED_MEMORY = Path("/dev/shm")


def leave_segment(name: str) -> None:
    (SHARED_MEMORY / f"trimtab-{os.getpid()}-{name}").write_bytes(b"left")


def kill_rank_1_in_a_collective(name: str) -> None:
    leave_segment(name)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_rank_killed_in_a_collective_is_named_and_its_files_are_removed() -> None:
    name = f"test-{os.getpid()}"
    start = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1 \(process \d+\) was killed by SIGKILL; the run was stopped"):
        launch(kill_rank_1_in_a_collective, (name,), ranks=2)
    assert time.monotonic() - start < 30
    assert not list(SHARED_MEMORY.glob(f"trimtab-*-{name}"))


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
    time.sleep(3)
    return name


class SlowArgument:
    """An argument that takes seconds to unpickle."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return slow_read, (self.name,)


@pytest.mark.parametrize("when", ["it starts", "it runs"])
def test_ranks_end_with_a_launcher_that_is_killed(when: str, tmp_path: Path) -> None:
    name = f"test-{os.getpid()}"
    program = tmp_path / "program.py"
    source = Path(__file__).read_text()
    argument = f"SlowArgument({name!r})" if when == "it starts" else repr(name)
    program.write_text(f"{source}\nif __name__ == '__main__':\n    launch(block_forever, ({argument},), ranks=2)\n")
    launcher = subprocess.Popen([sys.executable, str(program)], start_new_session=True)
    try:
        ranks = wait_for(lambda: [int(p.name.split("-")[1]) for p in SHARED_MEMORY.glob(f"trimtab-*-{name}")], 2)
        launcher.kill()
        launcher.wait()
        wait_for(lambda: [rank for rank in ranks if not Path(f"/proc/{rank}").exists()], 2)
        assert not list(SHARED_MEMORY.glob(f"trimtab-*-{name}"))
    finally:
        launcher.kill()


def wait_for(find: Callable[[], list[int]], count: int) -> list[int]:
    deadline = time.monotonic() + 60
    while len(found := find()) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found
