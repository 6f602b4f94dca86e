"""Faults in the order of transfers, to show that tests with `helpers.late_device` fail without that order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers import late_device
from trimtab.runtime.layer import instance
from trimtab.runtime.transfer import mirror, peer_memory, ring
from trimtab.runtime.transfer.copy_engine import BackgroundCopies
from trimtab.runtime.transfer.returns import GradientReturns
from trimtab.runtime.transfer.ring import ReplicaRing
from trimtab.runtime.transfer.transfers import Transfers
from trimtab.runtime.transfer.visits import Instance, Visits

Mutant = Callable[[pytest.MonkeyPatch], None]


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Apply one of `MUTANTS` to the runtime of this process; none if the name is empty."""
    with pytest.MonkeyPatch.context() as patch:
        if name:
            MUTANTS[name](patch)
        yield


def _replicas_without_wait(patch: pytest.MonkeyPatch) -> None:
    replicas = ReplicaRing.replicas

    def without_wait(self: ReplicaRing, micro_step: int, layer: int) -> list[torch.Tensor]:
        self._held[micro_step, layer].waits = []
        return replicas(self, micro_step, layer)

    patch.setattr(ReplicaRing, "replicas", without_wait)


def _wait_on_the_copying_stream(patch: pytest.MonkeyPatch) -> None:
    start = BackgroundCopies.start

    def on_own_stream(self: BackgroundCopies, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        start(self, pairs)
        stream = self._stream
        assert stream is not None
        return lambda: stream.wait_event(stream.record_event())

    patch.setattr(BackgroundCopies, "start", on_own_stream)


def _copies_before_compute(patch: pytest.MonkeyPatch) -> None:
    """A copy does not wait for compute that may still read its target."""
    patch.setattr(late_device.Stream, "wait_stream", lambda self, other: None)


def _eviction_without_wait(patch: pytest.MonkeyPatch) -> None:
    free_buffer = ReplicaRing._free_buffer

    def without_wait(self: ReplicaRing, needed: Sequence[Instance]) -> int:
        if len(self._held) == len(self._buffers):
            next(arrival for key, arrival in self._held.items() if key not in needed).waits = []
        return free_buffer(self, needed)

    patch.setattr(ReplicaRing, "_free_buffer", without_wait)


def _buffer_in_use(patch: pytest.MonkeyPatch) -> None:
    """If all buffers are used, another instance gets the buffer of the newest one, which is still needed."""
    free_buffer = ReplicaRing._free_buffer

    def in_use(self: ReplicaRing, needed: Sequence[Instance]) -> int:
        if len(self._held) < len(self._buffers):
            return free_buffer(self, needed)
        newest = [*self._held.values()][-1]
        for wait in newest.waits:
            wait()
        return newest.buffer

    patch.setattr(ReplicaRing, "_free_buffer", in_use)


def _drain_without_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaRing, "drain", lambda self: self._held.clear())


def _complete_without_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaRing, "complete", lambda self: None)


def _sends_without_wait(patch: pytest.MonkeyPatch) -> None:
    """Before weights change, a home rank waits for its own replicas only."""
    patch.setattr(ReplicaRing, "_wait_for_sends", lambda self, chosen: None)


def _returns_without_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradientReturns, "_wait", lambda self, pending: None)


def _order_of_rank(patch: pytest.MonkeyPatch) -> None:
    """Odd ranks predict layers in the opposite order."""
    coming = Visits.coming

    def opposite(self: Visits, most: int, num_layers: int) -> Iterator[Instance]:
        return reversed([*coming(self, most, num_layers)])

    if dist.get_rank() % 2:
        patch.setattr(Visits, "coming", opposite)


def _fetch_after_exchange(patch: pytest.MonkeyPatch) -> None:
    """Odd ranks post messages of weights after a layer's first exchange of rows, the others before it.

    Harmless where messages of different groups do not wait for each other.
    """
    prefetch, send = instance.Instance._prefetch, instance.Instance.send
    later: list[tuple[instance.Instance, Transfers]] = []

    def send_first(self: instance.Instance, kind: int, rows: torch.Tensor, *, back: bool) -> torch.Tensor:
        arrived = send(self, kind, rows, back=back)
        while later:
            prefetch(*later.pop())
        return arrived

    if dist.get_rank() % 2:
        patch.setattr(instance.Instance, "_prefetch", lambda self, transfers: later.append((self, transfers)))
        patch.setattr(instance.Instance, "send", send_first)


def _no_barrier_before_rewriting(patch: pytest.MonkeyPatch) -> None:
    _replace_dist(patch, ring, barrier=lambda group: None)


def _no_barrier_after_rewriting(patch: pytest.MonkeyPatch) -> None:
    for module in (mirror, peer_memory):
        _replace_dist(patch, module, barrier=lambda group: None)


def _replace_dist(patch: pytest.MonkeyPatch, module: ModuleType, **others: object) -> None:
    """Replace functions of `torch.distributed` in one module."""
    patch.setattr(module, "dist", SimpleNamespace(**{**vars(dist), **others}))


MUTANTS: dict[str, Mutant] = {
    "replicas without wait": _replicas_without_wait,
    "wait on the copying stream": _wait_on_the_copying_stream,
    "copies before compute": _copies_before_compute,
    "eviction without wait": _eviction_without_wait,
    "place in use": _buffer_in_use,
    "drain without wait": _drain_without_wait,
    "complete without wait": _complete_without_wait,
    "sends without wait": _sends_without_wait,
    "returns without wait": _returns_without_wait,
    "order of rank": _order_of_rank,
    "fetch after exchange": _fetch_after_exchange,
    "no barrier before rewriting": _no_barrier_before_rewriting,
    "no barrier after rewriting": _no_barrier_after_rewriting,
}
