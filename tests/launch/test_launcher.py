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

from trimtab.errors import RankFailedError
from trimtab.launch import launch

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
