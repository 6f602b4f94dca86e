"""`Counters`: what transfers moved, and for how long they held up the compute."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trimtab.runtime.copies import Wait


@dataclass(eq=False)
class Counters:
    """What transfers came to, since it was last taken.

    Attributes:
        peer_bytes: replica weights that this rank sent to others, or pulled from its neighbours' memory.
        host_bytes: replica weights that it copied from its node's mirror.
        mirror_bytes: weights that this rank sent to the mirrors of other nodes.
        gradient_bytes: replica gradients that this rank sent home.
        moved_bytes: rows of experts that this rank sent to their new homes.
        refresh_s: seconds that bringing changed weights into staging memory and mirrors took.
        waits: (start, end) of every wait for a transfer, in seconds on the host or as events on the device.
    """

    peer_bytes: int = 0
    host_bytes: int = 0
    mirror_bytes: int = 0
    gradient_bytes: int = 0
    moved_bytes: int = 0
    refresh_s: float = 0.0
    waits: list[tuple[float, float] | tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def wait(self, waits: Sequence[Wait], device: torch.device) -> None:
        """Wait for transfers, and remember for how long that held up what comes next."""
        if device.type != "cuda":
            start = time.perf_counter()
            for wait in waits:
                wait()
            self.waits.append((start, time.perf_counter()))
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        for wait in waits:
            wait()
        after.record()
        self.waits.append((before, after))

    @property
    def exposed_s(self) -> float:
        """Seconds that transfers held up the compute. On CUDA it waits for the device."""
        total = 0.0
        for start, end in self.waits:
            if isinstance(start, torch.cuda.Event):
                assert isinstance(end, torch.cuda.Event)
                end.synchronize()
                total += start.elapsed_time(end) / 1e3
            else:
                assert isinstance(end, float)
                total += end - start
        return total

    def clear(self) -> None:
        """Start anew."""
        vars(self).update(vars(Counters()))
