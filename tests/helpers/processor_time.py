"""Processor time of a group of processes: limits that do not depend on what else the machine does."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Processes wait for something that does not come if for this long their main threads never run, and others hardly do.
IDLE_S = 30.0
IDLE_SHARE = 0.15
# How the two reasons to end processes begin.
TOO_LONG, NO_PROGRESS = "more than", "no progress"


def seconds_of(processes: Iterable[int]) -> float:
    """Processor seconds of processes, and of their children that have ended. One that is gone counts as 0."""
    return sum(sum(map(int, fields[11:15])) for fields in _fields(processes)) / TICKS_PER_S


def _fields(processes: Iterable[int]) -> Iterator[list[str]]:
    """What the system tells of each process, from its state on (proc(5), /proc/pid/stat, fields 3 and following)."""
    for process in processes:
        with suppress(OSError):
            yield Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def session_of(leader: int) -> list[int]:
    """Processes of the session that a process leads."""
    found = []
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and os.getsid(int(name)) == leader:
                found.append(int(name))
    return found


def descendants_of(ancestor: int) -> list[int]:
    """A process, its children, their children and so on."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        for fields in _fields([int(name)]):
            parents[int(name)] = int(fields[1])
    found, size = {ancestor}, 0
    while len(found) > size:
        size = len(found)
        found |= {process for process, parent in parents.items() if parent in found}
    return sorted(found)


class ProcessorLimit:
    """Says when processes have used too much processor time, or have waited for too long without using any.

    Args:
        limit_s: processor seconds from now on.
        idle_s: seconds that they may wait; `IDLE_S` by default.
    """

    def __init__(self, processes: Sequence[int], limit_s: float, idle_s: float | None = None) -> None:
        self._limit_s, self._idle_s = limit_s, idle_s or IDLE_S
        self._start_s = self._last_s = seconds_of(processes)
        self._last_time = time.monotonic()

    def exceeded(self, processes: Sequence[int]) -> str:
        """Why the processes should be ended; "" as long as they may go on. To be called several times a second."""
        used_s, now = seconds_of(processes), time.monotonic()
        if used_s - self._start_s > self._limit_s:
            return f"{TOO_LONG} {self._limit_s:.0f} s of processor time"
        # What else runs leaves less for these processes.
        crowd = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        allowed_s = IDLE_SHARE / crowd * len(processes) * (now - self._last_time)
        if any(fields[0] in "RD" for fields in _fields(processes)) or used_s - self._last_s > 1.0 + allowed_s:
            self._last_s, self._last_time = used_s, now
        return f"{NO_PROGRESS} in {self._idle_s:.0f} s" if now - self._last_time > crowd * self._idle_s else ""
