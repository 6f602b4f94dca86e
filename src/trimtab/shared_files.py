"""Files in shared memory, named after the process that made them, so that they can be removed after it has ended."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")

_numbers = itertools.count()


def new_shared_file() -> Path:
    """A name in shared memory that this process has not used yet. The caller creates the file."""
    return SHARED_MEMORY / f"trimtab-{os.getpid()}-{next(_numbers)}"


def remove_shared_files(pid: int) -> None:
    """Remove the files that a process made and did not unlink. Processes that have them mapped keep the memory."""
    for path in SHARED_MEMORY.glob(f"trimtab-{pid}-*"):
        path.unlink(missing_ok=True)


def free_shared_memory() -> int:
    """Free bytes of shared memory."""
    state = os.statvfs(SHARED_MEMORY)
    return state.f_bavail * state.f_frsize
