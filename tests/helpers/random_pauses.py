"""`random_pauses`: the host, compute and copies of a planned layer are late by random times, as on a busy machine."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from trimtab.runtime.layer.layer import ExpertLayer
from trimtab.runtime.transfer import streams
from trimtab.runtime.transfer.streams import BackgroundCopies, Wait

# A layer of the tested sizes takes about as long.
LONGEST_S = 3e-3
# Cycles of `torch.cuda._sleep` in a second, about; the clock rate of present GPUs.
CYCLES_PER_S = 1.5e9


def draw_s() -> float:
    """Seconds of the next pause; half of them are 0."""
    return max(0.0, random.uniform(-LONGEST_S, LONGEST_S))


def pause(device: torch.device) -> None:
    """Pause the host, and compute that is queued after this call."""
    time.sleep(draw_s())
    if streams.has_streams(device):
        torch.cuda._sleep(int(draw_s() * CYCLES_PER_S))


@contextmanager
def random_pauses(seed: int) -> Iterator[None]:
    """Pauses before layers, forward and backward, and before copies.

    Args:
        seed: another one on each rank.
    """
    random.seed(seed)
    start, call = BackgroundCopies.start, ExpertLayer.__call__

    def start_late(copies: BackgroundCopies, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Wait:
        if copies._stream is not None:
            with torch.cuda.stream(copies._stream):
                torch.cuda._sleep(int(draw_s() * CYCLES_PER_S))
        elif copies._pool is not None:
            copies._pool.submit(time.sleep, draw_s())
        return start(copies, pairs)

    def call_late(layer: ExpertLayer, hidden: torch.Tensor, *routed: Any) -> torch.Tensor:
        pause(hidden.device)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: pause(gradient.device))
        return call(layer, hidden, *routed)

    with (
        mock.patch.object(BackgroundCopies, "start", start_late),
        mock.patch.object(ExpertLayer, "__call__", call_late),
    ):
        yield
