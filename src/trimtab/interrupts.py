"""Ctrl-C while processes start: each would print the stack of its imports."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


def end_now(*_: object) -> None:
    """Handler of Ctrl-C while a command is imported. Some libraries would ignore an exception then."""
    os._exit(130)


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Processes that this thread starts in this context get no Ctrl-C until `take_interrupts`. Here it comes at the
    context's end."""
    # Not at the top: `trimtab` imports this file first.
    from multiprocessing import resource_tracker

    # Started within, it would let interrupts through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_interrupts(handler: signal.Handlers) -> None:
    """Take Ctrl-C in a process that was started in `interrupts_later`, also one that came since then."""
    signal.signal(signal.SIGINT, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
