"""`Recorder`: the activities of a rank over time, for a step that is examined. Nothing is recorded without one.

A rank does one thing at a time, so that it is enough to note when it turns to something else. On CUDA the moments are
events on the stream that computes; that part has not run on a GPU yet.
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
# What a forward activity is in backward.
BACKWARD = 4
WAITING, REFRESHING, SUMMING = range(8, 11)


@dataclass(frozen=True, eq=False)
class Recording:
    """What one rank did, one thing after the other.

    Attributes:
        kind_N: `[N]` uint8, index into `ACTIVITIES`.
        layer_N: `[N]` int16, -1 for none.
        start_N, end_N: `[N]` float64, seconds since the recorder was made.
        micro_steps: which ran, and when each began and ended; recompute and update of one are two.
    """

    kind_N: Array
    layer_N: Array
    start_N: Array
    end_N: Array
    micro_steps: tuple[tuple[int, float, float], ...]


class Recorder:
    """Takes notes from now on, until `finish`."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._kinds: list[int] = []
        self._layers: list[int] = []
        self._micro_steps: list[tuple[int, int, int]] = []
        self.turn_to(OTHER)

    def turn_to(self, kind: int, layer: int = -1) -> None:
        """From here on this rank does something else."""
        if self._on_cuda:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._times.append(time.perf_counter())
        self._kinds.append(kind)
        self._layers.append(layer)

    @contextmanager
    def during(self, kind: int) -> Iterator[None]:
        """Something in between, after which what was done before goes on."""
        before = self._kinds[-1], self._layers[-1]
        self.turn_to(kind)
        try:
            yield
        finally:
            self.turn_to(*before)

    @contextmanager
    def micro_step(self, index: int) -> Iterator[None]:
        """A context that assigns what is recorded to this micro-step."""
        first = len(self._kinds)
        self.turn_to(OTHER)
        try:
            yield
        finally:
            self._micro_steps.append((index, first, len(self._kinds)))
            self.turn_to(OTHER)

    def finish(self) -> Recording:
        """Everything so far. On CUDA it waits for the device."""
        self.turn_to(OTHER)
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
