"""`ReplicaRing`: transfers of replicas' weights to slots, a few layers before they are used.

All layers and micro-steps share the ring's buffers, so that memory does not grow with depth. A replica whose buffer
was reused is transferred again in backward. The next instances are predicted from the order of earlier ones; see
`Visits`. Every rank starts the transfers of the same instances in the same order, whether or not it holds a replica
of them, so sends and receives between two ranks are posted in the same order.

Weights are copied from the node's mirror, from the symmetric memory of a rank of the node if there is any, or sent as
messages. On a GPU messages and copies are ordered by streams. Tests without a GPU check this order on simulated streams
(`tests/helpers/late_device.py`); NCCL itself is not tested.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist

from trimtab.planner.replicas.paths import HOST
from trimtab.runtime.program.physical_experts import InstanceReplicas, Replica, ReplicasOfStep
from trimtab.runtime.ranks.lockstep import message_tag
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer import streams
from trimtab.runtime.transfer.counters import Counters
from trimtab.runtime.transfer.message_rounds import MOST_OPERATIONS, Message, post
from trimtab.runtime.transfer.mirror import NodeMirror
from trimtab.runtime.transfer.peer_memory import PeerMemory
from trimtab.runtime.transfer.streams import BackgroundCopies, Wait

# Visits ahead in which replicas are looked for. Few layers with replicas are further apart.
AHEAD = 8


@dataclass(eq=False)
class _Arrival:
    """The replicas of an instance on this rank: buffer in the ring, number, and waits for their transfers."""

    buffer: int
    count: int
    waits: list[Wait]

    def wait(self) -> None:
        """Wait for the transfers, once: a second wait for a message of gloo may never end."""
        waits, self.waits = self.waits, [_raise_incomplete]
        for wait in waits:
            wait()
        self.waits = []


def _raise_incomplete() -> None:
    raise RuntimeError("an earlier wait for weights of replicas failed or was interrupted; this session can't go on")


class ReplicaRing:
    """The buffers of the ring, and the transfers into them.

    Args:
        homes: this rank's home experts of all layers.
        buffers: number of buffers, at least 2. Each holds one instance; one is in use while the others are filled.

    Attributes:
        mirror: source of host-path replicas.
        peers: source of peer-path replicas with a home on this node; None if these are sent as messages.
    """

    def __init__(
        self,
        topology: Topology,
        homes: Sequence[HomeExperts],
        *,
        buffers: int,
        mirror: NodeMirror,
        counters: Counters,
    ) -> None:
        self.counters = counters
        self.mirror = mirror
        self.peers: PeerMemory | None = None
        self._topology = topology
        self._homes = homes
        self._device = homes[0].device
        self._buffers: list[list[torch.Tensor]] = [[] for _ in range(buffers)]
        self._slots = -1
        # Separate, so that copies of one path do not wait for those of the other.
        self.host_copies, self.peer_copies = BackgroundCopies(self._device), BackgroundCopies(self._device)
        self._visits = Visits()
        self._plan_number = 0
        self._replicas: ReplicasOfStep | None = None
        self._held: dict[Instance, _Arrival] = {}
        # Instances that were started before their layer ran.
        self._ahead = 0
        self._free = [*range(buffers)]
        # By micro-step.
        self._sends: dict[int, list[dist.Work]] = {}

    @property
    def nbytes(self) -> int:
        """Memory of all buffers."""
        return sum(tensor.nbytes for buffer in self._buffers for tensor in buffer)

    def prepare(self, replicas: ReplicasOfStep, plan_number: int, slots: int) -> None:
        """Set the plan, and allocate its slots. The ring must be drained.

        Args:
            replicas: the plan's replicas.
            plan_number: the plan's number in the session.
            slots: most replicas of one instance on a rank.
        """
        self._replicas, self._plan_number = replicas, plan_number
        if slots != self._slots:
            first = self._homes[0]
            # The old memory is free before.
            self._slots, self._buffers = -1, [[] for _ in self._buffers]
            for buffer in self._buffers:
                buffer += [
                    torch.zeros(slots, *shape, dtype=first.dtype, device=self._device) for shape in first.expert_shapes
                ]
            self._slots = slots

    def begin(self, micro_step: int) -> None:
        """Start the transfers of a micro-step's first layers. Call at the start of its forward."""
        for works in self._sends.values():
            works[:] = [work for work in works if not work.is_completed()]
        self._visits.enter(micro_step)
        self._fetch(None)

    def prefetch(self, micro_step: int, layer: int) -> None:
        """Start a layer's transfers and those of predicted instances. Call before it runs, forward or backward.

        Later ones are started several at once, when less than half of the buffers are ahead.
        """
        assert self._replicas is not None
        if not self._replicas.may_have_any:
            return
        instance = micro_step, layer
        is_predicted, is_held = self._visits.visit(micro_step, layer), instance in self._held
        self._ahead -= is_held
        is_there = is_held or not self._replicas.count(micro_step, layer)
        if not (is_predicted and is_there and 2 * self._ahead >= len(self._buffers)):
            self._fetch(instance)

    def replicas(self, micro_step: int, layer: int) -> list[torch.Tensor]:
        """This rank's replicas of a prefetched instance, `[count, ...]` for each tensor. Waits for their transfers."""
        arrival = self._held[micro_step, layer]
        if arrival.waits:
            self.counters.wait([arrival.wait], self._device)
        return [tensor[: arrival.count] for tensor in self._buffers[arrival.buffer]]

    def complete(self) -> None:
        """Wait for all transfers in progress, before weights change."""
        for arrival in self._held.values():
            arrival.wait()
        for of_micro_step in [*self._sends]:
            self._wait_for_sends(of_micro_step)

    def end(self, micro_step: int | None) -> None:
        """Wait for a micro-step's sends at the end of its forward, so that they do not hold the weights' memory; for
        all sends, if it is None. On a GPU memory is not reused before they end, and compute does not wait."""
        if not streams.has_streams(self._device):
            for number in [*self._sends] if micro_step is None else [micro_step]:
                self._wait_for_sends(number)

    def drain(self) -> None:
        """Wait for all transfers and drop all replicas."""
        self.complete()
        self._held.clear()
        self._ahead, self._free = 0, [*range(len(self._buffers))]

    def quiesce(self) -> None:
        """Barrier: no transfer is reading weights on any rank, and writes to them are done. Collective."""
        self.drain()
        self._visits.refresh()
        if self.peers is not None or self.mirror.is_used:
            streams.synchronize(self._device)
            dist.barrier(group=self._topology.expert_control)

    def refresh(self) -> None:
        """Copy the present weights to mirrors and symmetric memory. Collective, after `quiesce`."""
        if self.peers is not None:
            self.peers.fill(self._homes)
        self.counters.mirror_bytes += self.mirror.refresh(self._homes)

    def take_cpu_s(self) -> float:
        """Seconds of CPU time of the copying threads since the last call."""
        return self.host_copies.take_cpu_s() + self.peer_copies.take_cpu_s()

    def close(self) -> None:
        """Release threads and shared memory."""
        self.drain()
        for copies in (self.host_copies, self.peer_copies):
            copies.close()
        self.peers = None
        self.mirror.close()

    def _wait_for_sends(self, micro_step: int) -> None:
        for work in self._sends.pop(micro_step, ()):
            work.wait()

    def _fetch(self, now: Instance | None) -> None:
        """Start the transfers of `now` and of the next predicted instances with replicas that are not already held.

        At most one instance per buffer.
        """
        assert self._replicas is not None
        if not self._replicas.may_have_any:
            return
        window: list[Instance] = []
        room = len(self._buffers)
        coming = self._visits.coming(AHEAD, len(self._homes))
        for instance in coming if now is None else itertools.chain((now,), coming):
            if self._replicas.count(*instance) and instance not in window:
                window.append(instance)
                room -= 1
                if not room:
                    break
        self._ahead = len(window) - (now in window)
        for instance in window:
            if instance not in self._held:
                self._start(instance, self._replicas.of(*instance), window)

    def _start(self, instance: Instance, replicas: InstanceReplicas, needed: Sequence[Instance]) -> None:
        layer, located = self._homes[instance[1]], replicas.located(self._homes[instance[1]].places)
        arrival = self._held[instance] = _Arrival(self._free_buffer(needed), 0, [])
        buffer = self._buffers[arrival.buffer]
        # Slots are overwritten outside autograd; increasing the version makes backward raise if autograd saved one.
        torch.autograd.graph.increment_version(buffer)
        from_host: list[tuple[torch.Tensor, torch.Tensor]] = []
        from_peers: list[tuple[torch.Tensor, torch.Tensor]] = []
        sent: list[Replica] = []
        rank, per_node = self._topology.rank, self._topology.ranks_per_node
        for replica in located:
            slots = [tensor[replica.slot] for tensor in buffer] if replica.rank == rank else []
            arrival.count += replica.rank == rank
            if replica.path == HOST:
                if slots:
                    from_host += zip(slots, self.mirror.row(layer.index, replica.expert), strict=True)
            elif self.peers is None or replica.home // per_node != replica.rank // per_node:
                sent.append(replica)
            else:
                if slots:
                    from_peers += zip(slots, self.peers.row(layer.index, replica.home, replica.row), strict=True)
                    self.counters.peer_bytes += layer.expert_bytes
        if from_host:
            arrival.waits.append(self.host_copies.start(from_host))
            self.counters.host_bytes += sum(source.nbytes for _, source in from_host)
        if from_peers:
            arrival.waits.append(self.peer_copies.start(from_peers))
        tag = message_tag((self._plan_number, *instance))
        for receives, work in post(self._messages(layer, sent, buffer), rank, self._topology.weights, tag=tag):
            # Compute does not wait for sends, whose sources change only after `complete`.
            if receives:
                arrival.waits.append(work.wait)
            else:
                self._sends.setdefault(instance[0], []).append(work)

    def _messages(self, layer: HomeExperts, sent: list[Replica], buffer: Sequence[torch.Tensor]) -> list[Message]:
        """Messages of weights, of all ranks if there may be several rounds of them."""
        rank = self._topology.rank
        if len(sent) * len(buffer) <= MOST_OPERATIONS:
            sent = [replica for replica in sent if rank in (replica.home, replica.rank)]
        messages: list[Message] = []
        for replica in sent:
            tensors: Iterable[torch.Tensor | None] = [None] * len(buffer)
            if replica.rank == rank:
                tensors = [tensor[replica.slot] for tensor in buffer]
            elif replica.home == rank:
                tensors = layer.source(replica.row)
                self.counters.peer_bytes += layer.expert_bytes
            messages += [Message(replica.home, replica.rank, tensor) for tensor in tensors]
        return messages

    def _free_buffer(self, needed: Sequence[Instance]) -> int:
        """A free buffer, else that of the oldest instance that is not in `needed`."""
        if not self._free:
            arrival = self._held.pop(next(key for key in self._held if key not in needed))
            self._free.append(arrival.buffer)
            arrival.wait()
        return self._free.pop()


# Events that are kept at least; at most twice as many.
KEPT_EVENTS = 1 << 15
# Most places of the log that are compared with its end, and most events that are compared at each.
CANDIDATES = 32
COMPARED = 4096

Instance = tuple[int, int]
"""A micro-step's number and a layer."""

_ENTER, _REFRESH = -1, -2

_Event = tuple[int, int]
"""`_ENTER` or `_REFRESH` and 0; or a layer, and the micro-step's number less that of the event before."""


class Visits:
    """Predicts the next instances of a training loop from a log of its earlier ones, equal on all ranks that make the
    same calls.

    Loops repeat. Forwards of several micro-steps may run before their backwards, or alternate with them (1F1B,
    interleaved chunks); a pass without gradients has forwards only. The prediction therefore searches the log for the
    longest earlier match of its end, and continues from there. Events contain the difference to the micro-step before,
    since the next step's micro-steps have other numbers.
    """

    def __init__(self) -> None:
        # What is compared of each event, and the micro-step's number less that of the event before.
        self._log: list[_Event] = []
        self._offsets: list[int] = []
        self._places: dict[_Event, list[int]] = {}
        # The event after the best match of the log's end: the predicted next event.
        self._next = 0
        self._micro_step = 0

    def enter(self, micro_step: int) -> None:
        """Log that a micro-step's forward begins."""
        self._note((_ENTER, 0), micro_step)

    def visit(self, micro_step: int, layer: int) -> bool:
        """Log that a layer runs, forward or backward. Returns whether it was predicted."""
        return self._note((layer, micro_step - self._micro_step), micro_step)

    def refresh(self) -> None:
        """Log that weights change. Nothing is prefetched across this point."""
        self._note((_REFRESH, 0), self._micro_step)

    def coming(self, most: int, num_layers: int) -> Iterator[Instance]:
        """The predicted next instances, none across a refresh: those after the best match of the log's end, among
        `2 * most` events; or the next layers in order if there is no match, at most `most`."""
        if self._next == len(self._log):
            yield from islice(self._next_layers(num_layers), most)
            return
        micro_step, events = self._micro_step, slice(self._next, self._next + 2 * most)
        for (layer, _), offset in zip(self._log[events], self._offsets[events], strict=True):
            if layer == _REFRESH:
                return
            micro_step += offset
            if layer != _ENTER:
                yield micro_step, layer

    def _next_layers(self, num_layers: int) -> Iterator[Instance]:
        if not self._log or self._log[-1][0] == _REFRESH:
            return
        before, last = self._log[-2][0] if len(self._log) > 1 else _REFRESH, self._log[-1][0]
        goes_up = self._offsets[-1] != 0 or last > before
        layers = range(last + 1, num_layers) if last == _ENTER or goes_up else range(last - 1, -1, -1)
        for layer in layers:
            yield self._micro_step, layer

    def _note(self, event: _Event, micro_step: int) -> bool:
        is_predicted = self._next < len(self._log) and self._log[self._next] == event
        self._log.append(event)
        self._offsets.append(micro_step - self._micro_step)
        self._micro_step = micro_step
        self._places.setdefault(event, []).append(len(self._log) - 1)
        self._next = self._next + 1 if is_predicted else self._best_match()
        if len(self._log) > 2 * KEPT_EVENTS:
            self._shorten()
        return is_predicted

    def _best_match(self) -> int:
        """The event after the best earlier match of the log's end; the end of the log if there is no match."""
        log, end = self._log, len(self._log) - 1
        # A match of one layer only is not enough, since forward and backward run the same layers.
        best, longest = end + 1, 0 if log[end][0] == _ENTER else 1
        for place in reversed(self._places[log[end]][-CANDIDATES - 1 : -1]):
            length = 1
            while length < min(place + 1, COMPARED) and log[place - length] == log[end - length]:
                length += 1
            if length > longest:
                best, longest = place + 1, length
        return best

    def _shorten(self) -> None:
        dropped = len(self._log) - KEPT_EVENTS
        self._log, self._offsets = self._log[dropped:], self._offsets[dropped:]
        self._next -= dropped
        self._places = {}
        for place, event in enumerate(self._log):
            self._places.setdefault(event, []).append(place)
        if self._next <= 0:
            self._next = self._best_match()
