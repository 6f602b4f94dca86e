"""Faults in the order of transfers, to show that tests with `helpers.late_device` fail without that order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.late_streams import Stream
from trimtab.runtime.layer import layer_call
from trimtab.runtime.transfer import message_rounds, returns, ring, streams
from trimtab.runtime.transfer.message_rounds import Posted
from trimtab.runtime.transfer.ring import Instance, ReplicaRing, Visits

Mutant = Callable[[pytest.MonkeyPatch], None]


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Apply one of `MUTANTS` to the runtime of this process; none if the name is empty."""
    with pytest.MonkeyPatch.context() as patch:
        if name:
            MUTANTS[name](patch)
        yield


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
    prefetch, send = ReplicaRing.prefetch, layer_call.LayerCall.send
    later: list[tuple[ReplicaRing, int, int]] = []

    def send_first(self: layer_call.LayerCall, kind: int, rows: torch.Tensor, *, back: bool) -> torch.Tensor:
        arrived = send(self, kind, rows, back=back)
        while later:
            prefetch(*later.pop())
        return arrived

    if dist.get_rank() % 2:
        patch.setattr(ReplicaRing, "prefetch", lambda *args: later.append(args))
        patch.setattr(layer_call.LayerCall, "send", send_first)


def _without_wait(module: ModuleType, *, receives: bool) -> Mutant:
    """Messages that a module posts are not waited for: receives and batches with one, or sends."""

    def post(*args: Any, **named: Any) -> list[Posted]:
        done: Any = SimpleNamespace(wait=lambda: None, is_completed=lambda: False)
        return [(here, done if here == receives else work) for here, work in message_rounds.post(*args, **named)]

    return lambda patch: patch.setattr(module, "post", post)


def _copies_without_wait(patch: pytest.MonkeyPatch) -> None:
    """Compute does not wait for copies on side streams."""
    start = streams.BackgroundCopies._on_stream

    def on_stream(stream: torch.cuda.Stream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> streams.Wait:
        start(stream, pairs)
        return lambda: None

    patch.setattr(streams.BackgroundCopies, "_on_stream", staticmethod(on_stream))


def _copies_at_once(patch: pytest.MonkeyPatch) -> None:
    """Copies on side streams wait for compute up to the first event only, not for what they read."""
    firsts: list[Any] = []
    wait_stream = Stream.wait_stream

    def wait(self: Stream, other: Stream) -> None:
        firsts[:] = firsts or [other.record_event()]
        if self.device.late is None:
            wait_stream(self, other)
        else:
            self.wait_event(firsts[0])

    patch.setattr(Stream, "wait_stream", wait)


MUTANTS: dict[str, Mutant] = {
    # Before weights change, a home rank waits for its own replicas only.
    "sends without wait": _without_wait(ring, receives=False),
    "returns without wait": _without_wait(returns, receives=True),
    "order of rank": _order_of_rank,
    "fetch after exchange": _fetch_after_exchange,
    "copies without wait": _copies_without_wait,
    "copies at once": _copies_at_once,
}
