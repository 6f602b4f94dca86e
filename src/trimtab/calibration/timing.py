"""How long work takes on a device: on its own clock, as medians over variants that take turns.

Tests without a GPU reach the host's clock only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from trimtab.runtime.transfer.copy_engine import Wait

Mark = float | torch.cuda.Event | Future[float]
WARM_UP_ROUNDS = 2


class Clock:
    """Marks in time: events in the order of the device's work on CUDA, else moments of the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(1)

    def now(self) -> Mark:
        """When the work so far is done."""
        if self._aside is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def after(self, wait: Wait) -> Mark:
        """When a transfer is there, beside whatever else is done meanwhile."""
        if self._aside is None:
            return self._pool.submit(lambda: (wait(), time.perf_counter())[1])
        with torch.cuda.stream(self._aside):
            wait()
            return self.now()

    def seconds(self, start: Mark, end: Mark) -> float:
        """From one mark to another. Waits for them."""
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            end.synchronize()
            return start.elapsed_time(end) / 1e3
        return _moment(end) - _moment(start)

    def time(self, work: Callable[[], object]) -> float:
        """Seconds that work takes, with nothing else under way."""
        if self._aside is not None:
            torch.cuda.synchronize(self._device)
        start = self.now()
        work()
        return self.seconds(start, self.now())


def _moment(mark: Mark) -> float:
    assert not isinstance(mark, torch.cuda.Event)
    return mark.result() if isinstance(mark, Future) else mark


def medians(variants: Mapping[str, Callable[[], dict[str, float]]], rounds: int) -> dict[str, dict[str, float]]:
    """The median of every figure of every variant. They take turns, in an order that rotates."""
    names = list(variants)
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(WARM_UP_ROUNDS + rounds):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            figures = variants[name]()
            if number >= WARM_UP_ROUNDS:
                taken[name].append(figures)
    return {
        name: {figure: statistics.median(each[figure] for each in figures) for figure in figures[0]}
        for name, figures in taken.items()
    }
