"""`Interrupted`: as Ctrl-C in a process that is just starting."""

from __future__ import annotations

import os
import signal
from typing import Any


class Interrupted(int):
    """A number that interrupts the process which reads it from a pickle."""

    def __reduce__(self) -> Any:
        return interrupt_here, (int(self),)


def interrupt_here(number: int = 0) -> int:
    """Interrupt this process, and return the number."""
    os.kill(os.getpid(), signal.SIGINT)
    return number
