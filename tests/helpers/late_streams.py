"""Streams, events and messages of a simulated accelerator: queues of work, in which a piece runs when something waits
for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from helpers.late_device import LateDevice


class Stream:
    """A queue of work that runs when something waits for it.

    Attributes:
        has_waited: for compute, since the last block of copies.
    """

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.has_waited = False
        self._queue: deque[tuple[Callable[[], object], tuple[range, ...]]] = deque()
        self._done = 0

    @property
    def length(self) -> int:
        """Number of pieces of work that were queued so far."""
        return self._done + len(self._queue)

    def push(self, work: Callable[[], object], *targets: range) -> None:
        """Queue work that writes the addresses `targets`."""
        self._queue.append((work, targets))
        if self.device.mode == "early" and self is not self.device.compute:
            self.run(self.length)

    def run(self, until: int) -> None:
        """Run the first `until` pieces of work, counted from the start of the queue."""
        while self._done < until:
            work, _ = self._queue.popleft()
            self._done += 1
            work()

    def has_run(self, until: int) -> bool:
        return self._done >= until

    def writes(self, target: range) -> bool:
        """Whether queued work writes any of the addresses."""
        writes = (other for _, targets in self._queue for other in targets)
        return any(target.start < other.stop and other.start < target.stop for other in writes)

    # As `torch.cuda.Stream`.

    def wait_event(self, event: Event) -> None:
        self.has_waited |= event.stream is self.device.compute
        self.push(event.complete)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        event = Event(self.device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.device.wait_on_host()
        self.run(self.length)


class Compute(Stream):
    """The compute stream, if its work runs when it is queued."""

    def push(self, work: Callable[[], object], *targets: range) -> None:
        work()


class Event:
    """A position in a stream, as `torch.cuda.Event`."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.record()

    def record(self, stream: Stream | None = None) -> None:
        self.stream = self._device.current if stream is None else stream
        self._position = self.stream.length
        self._time_s = time.perf_counter()

    def query(self) -> bool:
        return self.stream.has_run(self._position)

    def complete(self) -> None:
        self.stream.run(self._position)

    def synchronize(self) -> None:
        self._device.wait_on_host()
        self.complete()

    def elapsed_time(self, end: Event) -> float:
        return (end._time_s - self._time_s) * 1e3


class Work:
    """A batch of messages, like `torch.distributed.Work` of NCCL: `wait` makes the current stream wait."""

    def __init__(self, event: Event, device: LateDevice) -> None:
        self._event, self._device = event, device

    def wait(self) -> bool:
        self._device.current.wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return self._event.query()
