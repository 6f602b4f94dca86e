"""`RandomDelays`: random pauses of compute and copies, so that transfers end in another order on every rank."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch

from trimtab.runtime.transfer import streams
from trimtab.runtime.transfer.ring import ReplicaRing
from trimtab.runtime.transfer.streams import BackgroundCopies, Wait

# Longest pause. A layer of the checked sizes takes about as long.
LONGEST_S = 3e-3
# Cycles of `torch.cuda._sleep` in a second, about; the clock rate of present GPUs.
CYCLES_PER_S = 1.5e9


class RandomDelays:
    """Pauses of the host, of the compute stream and of copies, drawn anew for each.

    Args:
        seed: another one on each rank.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw_s(self) -> float:
        """Seconds of the next pause; half of them are 0."""
        return max(0.0, self._random.uniform(-LONGEST_S, LONGEST_S))

    def pause(self, device: torch.device) -> None:
        """Pause the host, and compute that is queued after this call."""
        time.sleep(self.draw_s())
        if streams.has_streams(device):
            torch.cuda._sleep(int(self.draw_s() * CYCLES_PER_S))

    def slow_copies(self, ring: ReplicaRing, device: torch.device) -> None:
        """Pause before each copy of the ring's replicas. Nothing may be in transfer."""
        for copies in (ring.host_copies, ring.peer_copies):
            copies.close()
        ring.host_copies, ring.peer_copies = _SlowCopies(device, self), _SlowCopies(device, self)


class _SlowCopies(BackgroundCopies):
    """Copies with a pause before each."""

    def __init__(self, device: torch.device, delays: RandomDelays) -> None:
        super().__init__(device)
        self._delays = delays

    def start(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Wait:
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(int(self._delays.draw_s() * CYCLES_PER_S))
        elif self._pool is not None:
            self._pool.submit(time.sleep, self._delays.draw_s())
        return super().start(pairs)
