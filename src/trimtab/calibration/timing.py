"""`Clock`: seconds that work takes on a device, measured by CUDA events or by the host's clock.

Tests without a GPU run the host's clock only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from trimtab.calibration.alternating_rounds import alternate
from trimtab.runtime.transfer.streams import Wait

Mark = float | torch.cuda.Event | Future[float]


class Clock:
    """Points in time: events on the device's stream on CUDA, else the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(1)

    def now(self) -> Mark:
        """The time at which the work queued so far is done."""
        if self._side_stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def after(self, wait: Wait) -> Mark:
        """The time at which a transfer has arrived. Does not delay the compute that the caller queues next."""
        if self._side_stream is None:
            return self._pool.submit(lambda: (wait(), time.perf_counter())[1])
        with torch.cuda.stream(self._side_stream):
            wait()
            return self.now()

    def seconds(self, start: Mark, end: Mark) -> float:
        """Seconds between two times. Waits for both."""
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            end.synchronize()
            return start.elapsed_time(end) / 1e3
        return _host_seconds(end) - _host_seconds(start)

    def time(self, work: Callable[[], object]) -> float:
        """Seconds that work takes on an idle device."""
        if self._side_stream is not None:
            torch.cuda.synchronize(self._device)
        start = self.now()
        work()
        return self.seconds(start, self.now())

    def medians(self, works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
        """Median seconds of each work over alternating rounds."""
        timed = {name: partial(self.time, work) for name, work in works.items()}
        return {name: statistics.median(seconds) for name, seconds in alternate(timed, rounds).items()}


def _host_seconds(mark: Mark) -> float:
    assert not isinstance(mark, torch.cuda.Event)
    return mark.result() if isinstance(mark, Future) else mark
