"""`Channel` and `Turns`: messages between attention and expert ranks, and micro-batches that take turns on a rank.

A request has router weights, hidden states, and slots of experts on the rank, -1 for experts that are not there. Its
answer has weighted sums. A message is received into a buffer with the capacity of its micro-batch, so sizes never
travel ahead of it; only the bytes in use are sent. Messages are in host memory and go over gloo.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from trimtab.runtime.state.flat_memory import Like, carve, packed_bytes

Columns = Sequence[tuple[int, torch.dtype]]
"""Width and dtype of each part of a row."""

# Number of rows in a message that is the last one of its micro-batch.
END = -1


class Channel:
    """Messages of one micro-batch to and from one rank.

    Args:
        rank: the other rank.
        micro_batch: number of the micro-batch.
        capacity: most rows of a message.
        sent, received: columns in either direction.
    """

    def __init__(self, rank: int, micro_batch: int, capacity: int, sent: Columns, received: Columns) -> None:
        self._rank, self.micro_batch, self._sent, self._received = rank, micro_batch, sent, received
        self._outgoing = torch.empty(packed_bytes(_like(sent, capacity)), dtype=torch.uint8)
        self._incoming = torch.empty(packed_bytes(_like(received, capacity)), dtype=torch.uint8)
        self._sending: Any = None

    def listen(self) -> None:
        """Start to receive the next message."""
        self._receiving: Any = dist.irecv(self._incoming, self._rank, tag=self.micro_batch)

    def send(self, *columns: torch.Tensor) -> None:
        """Start to send columns `[rows, width]`, which are copied; send the end of the micro-batch without columns."""
        if self._sending is not None:
            self._sending.wait()
        rows = len(columns[0]) if columns else END
        like = _like(self._sent if columns else (), rows)
        for target, source in zip(carve(self._outgoing, like), (torch.tensor([rows]), *columns), strict=True):
            target.copy_(source)
        self._sending = dist.isend(self._outgoing[: packed_bytes(like)], self._rank, tag=self.micro_batch)
        if not columns:
            self._sending.wait()

    def receive(self) -> list[torch.Tensor] | None:
        """Columns `[rows, width]` of the next message, valid until `listen`; None if it ends the micro-batch."""
        self._receiving.wait()
        rows = int(carve(self._incoming, _like((), END))[0])
        return None if rows == END else carve(self._incoming, _like(self._received, rows))[1:]


def _like(columns: Columns, rows: int) -> list[Like]:
    """The number of rows, and the rows."""
    return [((1,), torch.int64), *(((rows, width), dtype) for width, dtype in columns)]


class Turns:
    """Threads of one rank, of which one runs at a time, in turn. The one whose turn it is holds the condition."""

    def __init__(self, count: int) -> None:
        self._order = deque(range(count))
        self._turn = threading.Condition()
        self._error: BaseException | None = None

    @property
    def now(self) -> int:
        """Number of the thread whose turn it is."""
        return self._order[0]

    def run(self, work: Callable[[int], None]) -> None:
        """Call `work` with every number, each on a thread. Raises what the first one raised."""

        def run_one(index: int) -> None:
            with self._turn:
                try:
                    self._wait(index)
                    work(index)
                except BaseException as error:
                    self._error = self._error or error
                self._order.remove(index)
                self._turn.notify_all()

        # A new thread computes on all cores, whatever the thread that starts it was told.
        cores = (torch.get_num_threads(),)
        with ThreadPoolExecutor(len(self._order), "micro-batch", torch.set_num_threads, cores) as pool:
            pool.map(run_one, [*self._order])
        if self._error is not None:
            raise self._error

    def give_way(self) -> None:
        """Let the others run until it is this one's turn again. Raises what another one raised."""
        me = self.now
        self._order.rotate(-1)
        self._turn.notify_all()
        self._wait(me)

    def _wait(self, index: int) -> None:
        self._turn.wait_for(lambda: self._error is not None or self.now == index)
        if self._error is not None:
            raise self._error
