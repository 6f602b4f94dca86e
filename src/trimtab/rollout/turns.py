"""`Turns`: threads of one rank that run one at a time, in a fixed order."""

from __future__ import annotations

import threading
from collections.abc import Callable


class StoppedError(Exception):
    """Another thread has failed."""


class Turns:
    """Micro-batches take turns: each runs until it waits for experts, and then the next one.

    All ranks have the same order, so messages between two ranks have one, too.

    Attributes:
        now: number of the micro-batch whose turn it is.
    """

    def __init__(self, count: int) -> None:
        self._active = list(range(count))
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self.now = 0

    def run(self, work: Callable[[int], None]) -> None:
        """Call `work` with the number of every micro-batch, each on a thread. Raises what the first one raised."""
        threads = [threading.Thread(target=self._run, args=(work, each), daemon=True) for each in self._active]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def give_way(self) -> None:
        """Let the other micro-batches run until it is this one's turn again."""
        with self._changed:
            me, self.now = self.now, self._next()
            self._changed.notify_all()
        self._wait(me)

    def _run(self, work: Callable[[int], None], index: int) -> None:
        try:
            self._wait(index)
            work(index)
        except StoppedError:
            return
        except BaseException as error:
            self._error = error
        with self._changed:
            following = self._next()
            self._active.remove(index)
            self.now = following
            self._changed.notify_all()

    def _wait(self, index: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self.now == index)
        if self._error is not None:
            raise StoppedError

    def _next(self) -> int:
        return self._active[(self._active.index(self.now) + 1) % len(self._active)]
