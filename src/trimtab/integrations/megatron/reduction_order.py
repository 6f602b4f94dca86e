"""`ReductionOrder`: Megatron's overlapped reductions of expert gradients, started in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


class ReductionOrder:
    """Starts the reductions of a model chunk's expert buckets in the order of the buckets.

    Megatron starts a bucket's reduction in backward, when its last gradient is there. The gradients of a layer's
    experts are complete at its end if the layer has replicas, and one after the other if it has none.
    Expert-data-parallel ranks have different plans, so two buckets that end in one layer could be reduced in different
    order, with each other's data. Buckets that are ready too early wait here.

    Args:
        bucket_groups: `expert_parallel_bucket_groups` of Megatron's DistributedDataParallel, in the order of backward.
    """

    def __init__(self, bucket_groups: Sequence[Any]) -> None:
        self._groups = list(bucket_groups)
        self._starts: list[Callable[..., None]] = [group.start_grad_sync for group in self._groups]
        self._ready: dict[int, dict[str, Any]] = {}
        self._next = 0
        for number, group in enumerate(self._groups):
            group.start_grad_sync = partial(self._start, number)
            group.reset = partial(self._reset, group.reset)

    def remove(self) -> None:
        """Undo all replacements."""
        for group in self._groups:
            del group.start_grad_sync, group.reset

    def _start(self, number: int, force_all_reduce: bool | None = False) -> None:
        self._ready[number] = {"force_all_reduce": force_all_reduce}
        while self._next in self._ready:
            options = self._ready.pop(self._next)
            start = self._starts[self._next]
            self._next = (self._next + 1) % len(self._groups)
            start(**options)

    def _reset(self, reset: Callable[[], None]) -> None:
        # Before a step; one that failed in backward has left buckets waiting.
        self._ready.clear()
        self._next = 0
        reset()
