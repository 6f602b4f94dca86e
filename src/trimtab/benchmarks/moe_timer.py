"""Host seconds that a model spends in its MoE blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class MoeTimer:
    """A sum of seconds, filled by hooks.

    Attributes:
        seconds: spent in the blocks so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def begin(self, *_: Any) -> None:
        """Hook before a block's forward or backward."""
        self._start = time.perf_counter()

    def end(self, *_: Any) -> None:
        """Hook after a block's forward or backward."""
        self.seconds += time.perf_counter() - self._start


@contextmanager
def time_blocks(blocks: list[nn.Module]) -> Iterator[MoeTimer]:
    """Time the forward and backward of MoE blocks inside the context."""
    timer = MoeTimer()
    handles = []
    for block in blocks:
        handles += [
            block.register_forward_pre_hook(timer.begin),
            block.register_forward_hook(timer.end),
            block.register_full_backward_pre_hook(timer.begin),
            block.register_full_backward_hook(timer.end),
        ]
    try:
        yield timer
    finally:
        for handle in handles:
            handle.remove()
