"""Suspended ranks: stopped by SIGSTOP or Ctrl-Z, so that they neither run nor end."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from trimtab.errors import RankFailedError

PR_SET_PDEATHSIG = 1


def is_suspended(pid: int) -> bool:
    """Whether a process is suspended. False if there is no such process, or no /proc."""
    return _state(pid) == "T"


def has_ended(pid: int) -> bool:
    """Whether a process has ended, also if its parent has not noticed yet. True without /proc."""
    return _state(pid) in ("", "Z", "X")


def _state(pid: int) -> str:
    """The state of a process, one letter; "" if there is no such process, or no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name before it may contain anything.
    return stat.rpartition(")")[2].split()[0]


def continue_with_launcher() -> None:
    """Continue this process when its parent ends, so that it can end too. Linux only; elsewhere it does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


class Suspensions:
    """Seconds for which ranks have been suspended while their launcher ran. Ctrl-Z suspends it too.

    Args:
        timeout: maximum for a rank.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()
        self._seconds: dict[int, float] = {}

    def add(self, pids: Mapping[int, int], seconds: float) -> None:
        """Look at all ranks, `seconds` after the last look.

        Args:
            pids: process ids of the ranks that run.

        Raises:
            RankFailedError: naming a rank that has been suspended for the timeout.
        """
        self._seconds = {
            rank: self._seconds.get(rank, 0.0) + seconds for rank, pid in pids.items() if is_suspended(pid)
        }
        for rank, suspended_s in self._seconds.items():
            if suspended_s >= self._timeout_s:
                name = f"rank {rank} (process {pids[rank]})"
                raise RankFailedError(f"{name} has been suspended for {suspended_s:.0f} s; the run was stopped")
