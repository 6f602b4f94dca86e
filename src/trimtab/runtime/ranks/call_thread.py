"""`CallThread`: runs blocking calls on a thread of its own."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable


class CallThread:
    """A thread that runs one blocking call at a time. The caller can stop waiting for it.

    A timeout of waiting is not passed to gloo, because a gloo timeout closes its connections.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str = "trimtab-calls") -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._errors: list[BaseException] = []
        self._done = threading.Semaphore(0)
        # A daemon thread, since a call may never return.
        arguments = (self._calls, self._errors, self._done)
        threading.Thread(target=_run_calls, args=arguments, name=name, daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def start(self, call: Callable[[], object]) -> None:
        """Run a call, after those before."""
        self._calls.put(call)

    def is_done(self, timeout_s: float) -> bool:
        """Wait for the call for at most some seconds; returns whether it is done."""
        return self._done.acquire(timeout=timeout_s)

    def result(self) -> None:
        """Raise the error of the call that is done, if any."""
        if self._errors:
            raise self._errors.pop()


def _run_calls(
    calls: queue.SimpleQueue[Callable[[], object] | None], errors: list[BaseException], done: threading.Semaphore
) -> None:
    while (call := calls.get()) is not None:
        try:
            call()
        except BaseException as error:
            errors.append(error)
        # Frees the objects that the call refers to.
        del call
        done.release()
