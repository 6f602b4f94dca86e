"""Hardware queues of a GPU: do the kernels that ranks have issued block each other?

A `QueueLog` records what a rank issues to the streams of a `late_device`: waits for events, copies, and communication
kernels, each with the kernels of other ranks that it needs. `blocked` then runs the logs of all ranks. Streams share
`connections` queues (`CUDA_DEVICE_MAX_CONNECTIONS`). A queue starts its work in the order of issue: work that waits
for an event, or for earlier work of its stream, holds up all work behind it. A communication kernel spins until those
of its peers run, and at most `resident` of them run on a GPU at a time. They start in the order of issue
(`NCCL_LAUNCH_ORDER_IMPLICIT`), without which ranks could choose different ones.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from helpers.late_device import LateDevice
from helpers.late_streams import Event, Stream
from trimtab.runtime.program import exchange

Key = tuple[Any, ...]


class Work(NamedTuple):
    """One piece of work.

    Attributes:
        stream: number of its stream.
        after: a stream, and how many pieces of its work have to be complete; None if it waits for no event.
        kernels: names of the communication that it is part of.
        peers: rank and name of each kernel that it needs.
    """

    stream: int
    after: tuple[int, int] | None = None
    kernels: tuple[Key, ...] = ()
    peers: tuple[tuple[int, Key], ...] = ()


class QueueLog:
    """What one rank issues, in order."""

    def __init__(self, device: LateDevice) -> None:
        self.works: list[Work] = []
        self._device, self._rank = device, dist.get_rank()
        self._numbers: dict[object, int] = {}
        self._lengths: Counter[int] = Counter()
        self._calls: Counter[Key] = Counter()
        self._ends: dict[Event, tuple[int, int]] = {}

    def add(self, stream: object, **fields: Any) -> None:
        number = self._numbers.setdefault(stream, len(self._numbers))
        self._lengths[number] += 1
        self.works.append(Work(number, **fields))

    def recorded(self, event: Event) -> None:
        number = self._numbers.setdefault(event.stream, len(self._numbers))
        self._ends[event] = number, self._lengths[number]

    def waits(self, stream: object, event: Event) -> None:
        self.add(stream, after=self._ends[event])

    def kernel(self, stream: object, messages: Sequence[tuple[Key, Sequence[int]]]) -> None:
        """A communication kernel between two waits: for compute before it, and of compute for it.

        Args:
            messages: names, and the ranks that have a part in each; the n-th of a name is the same on all of them.
        """
        names = []
        for name, _ in messages:
            self._calls[name] += 1
            names.append((*name, self._calls[name]))
        peers = tuple(
            (rank, each)
            for each, (_, ranks) in zip(names, messages, strict=True)
            for rank in ranks
            if rank != self._rank
        )
        self.waits(stream, self._device.current.record_event())
        self.add(stream, kernels=tuple(names), peers=peers)


@contextmanager
def recording(device: LateDevice) -> Iterator[QueueLog]:
    """A context that records the work of this rank: copies, messages, exchanges of rows, and collectives of others."""
    log = QueueLog(device)
    with pytest.MonkeyPatch.context() as patch:
        _before(patch, Stream, "wait_event", log.waits)
        _after(patch, Event, "record", lambda event, *_: log.recorded(event))
        _before(patch, LateDevice, "copy", lambda _device, stream, *_: log.add(stream))

        def post(operations: Sequence[dist.P2POp]) -> list[Any]:
            group = operations[0].group
            ranks, name = dist.get_process_group_ranks(group), group.group_name
            mine = ranks.index(dist.get_rank())
            ends = [(mine, o.group_peer)[:: 1 if o.op is dist.isend else -1] for o in operations]
            works = device.post_late(operations)
            stream = device._streams_of_groups[id(group)]
            log.kernel(stream, [((name, *end), [ranks[each] for each in end]) for end in ends])
            for work in works:
                log.recorded(work._event)
            return works

        patch.setattr(dist, "batch_isend_irecv", post)
        ends: dict[Any, Event] = {}

        def begin(rows: Any, _rows: Any, _send: Any, _receive: Any, group: Any, **_: Any) -> None:
            ends[rows] = _collective(log, device, group)

        _after(patch, exchange.RowExchange, "__init__", begin)
        _before(patch, exchange.RowExchange, "finish", lambda rows: log.waits(device.compute, ends.pop(rows)))
        all_reduce = dist.all_reduce

        def reduce(tensor: Any, *args: Any, **named: Any) -> Any:
            if hasattr(tensor.untyped_storage(), "is_late"):
                log.waits(device.compute, _collective(log, device, named.get("group") or dist.group.WORLD))
            return all_reduce(tensor, *args, **named)

        patch.setattr(dist, "all_reduce", reduce)
        yield log


def _collective(log: QueueLog, device: LateDevice, group: Any) -> Event:
    """A kernel of all ranks of a group, on the stream of the group. Returns its end."""
    stream = device._streams_of_groups.get(id(group)) or device.make_stream()
    device._streams_of_groups[id(group)] = stream
    log.kernel(stream, [((group.group_name, "all"), dist.get_process_group_ranks(group))])
    return stream.record_event()


def _before(patch: pytest.MonkeyPatch, kind: type, name: str, call: Any) -> None:
    plain = getattr(kind, name)
    patch.setattr(kind, name, lambda *args, **named: (call(*args, **named), plain(*args, **named))[1])


def _after(patch: pytest.MonkeyPatch, kind: type, name: str, call: Any) -> None:
    plain = getattr(kind, name)
    patch.setattr(kind, name, lambda *args, **named: (plain(*args, **named), call(*args, **named))[0])


def blocked(works_R: Sequence[Sequence[Work]], connections: int, resident: int) -> list[Work]:
    """Work at the heads of queues that never starts, and kernels that spin without end; empty if all work ends."""
    queues_R: list[list[deque[tuple[int, int, Work]]]] = [[deque() for _ in range(connections)] for _ in works_R]
    for works, queues in zip(works_R, queues_R, strict=True):
        lengths: Counter[int] = Counter()
        kernels = 0
        for work in works:
            queues[work.stream % connections].append((lengths[work.stream], kernels, work))
            lengths[work.stream] += 1
            kernels += bool(work.peers)
    done_R: list[Counter[int]] = [Counter() for _ in works_R]
    spinning_R: list[list[Work]] = [[] for _ in works_R]
    started_R: list[set[Key]] = [set() for _ in works_R]
    kernels_R = [0] * len(works_R)
    moves = True
    while moves:
        moves = False
        for at, (queues, done, spinning) in enumerate(zip(queues_R, done_R, spinning_R, strict=True)):
            for queue in queues:
                while queue and _may_start(*queue[0], done, kernels_R[at] if len(spinning) < resident else -1):
                    work, moves = queue.popleft()[2], True
                    started_R[at].update(work.kernels)
                    kernels_R[at] += bool(work.peers)
                    if work.peers:
                        spinning.append(work)
                    else:
                        done[work.stream] += 1
            for work in [w for w in spinning if all(key in started_R[rank] for rank, key in w.peers)]:
                spinning.remove(work)
                done[work.stream] += 1
                moves = True
    heads = [queue[0][2] for queues in queues_R for queue in queues if queue]
    return heads + [work for spinning in spinning_R for work in spinning]


def _may_start(place: int, kernel: int, work: Work, done: Counter[int], next_kernel: int) -> bool:
    is_due = done[work.stream] == place and (work.after is None or done[work.after[0]] >= work.after[1])
    return is_due and (not work.peers or kernel == next_kernel)
