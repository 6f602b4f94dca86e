"""`Recorder`: a recording of a rank's activities over time.

A rank has one activity at a time, so that the start of each activity is also the end of the one before. On CUDA these
times are events on the compute stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from trimtab.array_type import Array

ACTIVITIES = (
    "attention and other", "dispatch", "experts", "combine",
    "attention and other, backward", "dispatch, backward", "experts, backward", "combine, backward",
    "waiting for replicas or their gradients", "refreshing mirrors", "gradient sums",
)  # fmt: skip
OTHER, DISPATCH, EXPERTS, COMBINE = range(4)
# Added to a forward activity, gives the same activity in backward.
BACKWARD = 4
WAITING, REFRESHING, SUMMING = range(8, 11)


@dataclass(frozen=True, eq=False)
class Recording:
    """The activities of one rank in order of time.

    Attributes:
        kind_N: `[N]` uint8, index into `ACTIVITIES`.
        layer_N: `[N]` int16, the layer; -1 for none.
        start_N, end_N: `[N]` float64, seconds since the recorder was created.
        micro_steps: number, start and end of every micro-step that was entered; recompute and update are two entries.
    """

    kind_N: Array
    layer_N: Array
    start_N: Array
    end_N: Array
    micro_steps: tuple[tuple[int, float, float], ...]


class Recorder:
    """Records from its creation until `finish`."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._kinds: list[int] = []
        self._layers: list[int] = []
        self._micro_steps: list[tuple[int, int, int]] = []
        self.mark(OTHER)

    def mark(self, kind: int, layer: int = -1) -> None:
        """Record that an activity starts now, and the previous one ends."""
        if self._on_cuda:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._times.append(time.perf_counter())
        self._kinds.append(kind)
        self._layers.append(layer)

    @contextmanager
    def during(self, kind: int) -> Iterator[None]:
        """A context for an activity within the present one, which continues afterwards."""
        before = self._kinds[-1], self._layers[-1]
        self.mark(kind)
        try:
            yield
        finally:
            self.mark(*before)

    @contextmanager
    def micro_step(self, index: int) -> Iterator[None]:
        """A context for the activities of a micro-step."""
        first = len(self._kinds)
        self.mark(OTHER)
        try:
            yield
        finally:
            self._micro_steps.append((index, first, len(self._kinds)))
            self.mark(OTHER)

    def finish(self) -> Recording:
        """The recording so far. On CUDA it waits for the device."""
        self.mark(OTHER)
        times = self._seconds()
        return Recording(
            np.array(self._kinds[:-1], np.uint8),
            np.array(self._layers[:-1], np.int16),
            times[:-1],
            times[1:],
            tuple((index, float(times[first]), float(times[last])) for index, first, last in self._micro_steps),
        )

    def _seconds(self) -> Array:
        if not self._on_cuda:
            return np.array(self._times) - self._times[0]
        torch.cuda.synchronize()
        return np.array([self._events[0].elapsed_time(event) / 1e3 for event in self._events])
