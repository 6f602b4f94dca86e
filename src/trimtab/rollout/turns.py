"""`Turns`: threads of one rank that run one at a time, in a fixed order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch


class Turns:
    """Micro-batches take turns: each runs until it waits for experts. The one whose turn it is holds the condition."""

    def __init__(self, count: int) -> None:
        self._order = deque(range(count))
        self._turn = threading.Condition()
        self._error: BaseException | None = None

    @property
    def now(self) -> int:
        """Number of the micro-batch whose turn it is."""
        return self._order[0]

    def run(self, work: Callable[[int], None]) -> None:
        """Call `work` with the number of every micro-batch, each on a thread. Raises what the first one raised."""
        # A new thread computes on all cores, whatever the thread that starts it was told.
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(len(self._order), "micro-batch", torch.set_num_threads, (threads,)) as pool:
            pool.map(partial(self._run, work), [*self._order])
        if self._error is not None:
            raise self._error

    def give_way(self) -> None:
        """Let the other micro-batches run until it is this one's turn again. Raises what another one raised."""
        me = self.now
        self._order.rotate(-1)
        self._turn.notify_all()
        self._wait(me)

    def _run(self, work: Callable[[int], None], index: int) -> None:
        with self._turn:
            try:
                self._wait(index)
                work(index)
            except BaseException as error:
                self._error = self._error or error
            self._order.remove(index)
            self._turn.notify_all()

    def _wait(self, index: int) -> None:
        self._turn.wait_for(lambda: self._error is not None or self.now == index)
        if self._error is not None:
            raise self._error
