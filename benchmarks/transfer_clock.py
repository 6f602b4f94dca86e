"""`TransferClock`: a clock that also tells when a transfer has arrived."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from trimtab.calibration.alternating_rounds import alternate
from trimtab.calibration.measurement import Clock, Mark
from trimtab.runtime.transfer.streams import Wait


class TransferClock(Clock):
    """Points in time of compute and of transfers beside it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(1)

    def after(self, wait: Wait) -> Callable[[], Mark]:
        """Waits for a transfer, and returns the time of its arrival. Does not delay compute that is queued next."""
        if self._side_stream is None:
            arrival: Future[float] = self._pool.submit(lambda: (wait(), time.perf_counter())[1])
            return arrival.result
        with torch.cuda.stream(self._side_stream):
            wait()
            mark = self.now()
        return lambda: mark

    def medians(self, works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
        """Median seconds of each work over alternating rounds."""
        timed = {name: partial(self.time, work) for name, work in works.items()}
        return {name: statistics.median(seconds) for name, seconds in alternate(timed, rounds).items()}
