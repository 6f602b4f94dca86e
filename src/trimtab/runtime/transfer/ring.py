"""`ReplicaRing`: transfers of replicas' weights to slots, a few layers before they are used.

All layers and micro-steps share the ring's buffers, so that memory does not grow with depth. A replica whose buffer
was reused is transferred again in backward. The next instances are predicted from the order of earlier ones; see
`visits.py`. Every rank starts the transfers of the same instances in the same order, whether or not it holds a replica
of them, so sends and receives between two ranks are posted in the same order.

Weights are copied from the node's mirror, from the symmetric memory of a rank of the node if there is any, or sent as
messages. On a GPU messages and copies are ordered by streams. Tests without a GPU check this order on simulated streams
(`tests/helpers/late_device.py`); NCCL itself is not tested.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trimtab.planner.replicas.paths import HOST
from trimtab.runtime.ranks.lockstep import message_tag
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.rows.physical_experts import InstanceReplicas, ReplicasOfStep
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer import streams
from trimtab.runtime.transfer.counters import Counters
from trimtab.runtime.transfer.message_rounds import Message, post
from trimtab.runtime.transfer.mirror import NodeMirror
from trimtab.runtime.transfer.peer_memory import PeerMemory
from trimtab.runtime.transfer.streams import BackgroundCopies, Wait
from trimtab.runtime.transfer.visits import Instance, Visits

# Visits ahead in which replicas are looked for. Few layers with replicas are further apart.
AHEAD = 8


@dataclass(eq=False)
class _Arrival:
    """The replicas of an instance on this rank: buffer in the ring, number, and waits for their transfers."""

    buffer: int
    count: int
    waits: list[Wait]


class ReplicaRing:
    """The buffers of the ring, and the transfers into them.

    Args:
        homes: this rank's home experts of all layers.
        slots: most replicas of one instance on a rank.
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
        slots: int,
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
        shapes, dtype = homes[0].expert_shapes, homes[0].dtype
        self._buffers = [
            [torch.zeros(slots, *shape, dtype=dtype, device=self._device) for shape in shapes] for _ in range(buffers)
        ]
        # Separate, so that copies of one path do not wait for those of the other.
        self.host_copies, self.peer_copies = BackgroundCopies(self._device), BackgroundCopies(self._device)
        self._visits = Visits()
        self._plan_number = 0
        self._replicas: ReplicasOfStep | None = None
        self._held: dict[Instance, _Arrival] = {}
        self._sends: list[tuple[Instance, dist.Work]] = []

    @property
    def nbytes(self) -> int:
        """Memory of all buffers."""
        return sum(tensor.nbytes for buffer in self._buffers for tensor in buffer)

    def prepare(self, replicas: ReplicasOfStep, plan_number: int) -> None:
        """Set the plan. The ring must be drained.

        Args:
            replicas: the plan's replicas.
            plan_number: the plan's number in the session.
        """
        self._replicas, self._plan_number = replicas, plan_number

    def begin(self, micro_step: int) -> None:
        """Start the transfers of a micro-step's first layers. Call at the start of its forward."""
        self._visits.enter(micro_step)
        self._fetch([])

    def prefetch(self, micro_step: int, layer: int) -> None:
        """Start a layer's transfers and those of predicted instances. Call before it runs, forward or backward."""
        self._visits.visit(micro_step, layer)
        self._fetch([(micro_step, layer)])

    def replicas(self, micro_step: int, layer: int) -> list[torch.Tensor]:
        """This rank's replicas of a prefetched instance, `[count, ...]` for each tensor. Waits for their transfers."""
        arrival = self._held[micro_step, layer]
        if arrival.waits:
            self.counters.wait(arrival.waits, self._device)
            arrival.waits = []
        return [tensor[: arrival.count] for tensor in self._buffers[arrival.buffer]]

    def complete(self) -> None:
        """Wait for all transfers in progress, before weights change."""
        for arrival in self._held.values():
            for wait in arrival.waits:
                wait()
            arrival.waits = []
        self._wait_for_sends(lambda _: True)

    def end(self, micro_step: int) -> None:
        """Wait for a micro-step's sends at the end of its forward, so that they do not hold the weights' memory. On a
        GPU memory is not reused before they end, and compute does not wait."""
        if not streams.has_streams(self._device):
            self._wait_for_sends(lambda instance: instance[0] == micro_step)

    def drain(self) -> None:
        """Wait for all transfers and drop all replicas."""
        self.complete()
        self._held.clear()

    def quiesce(self) -> None:
        """Barrier: no transfer is reading weights on any rank. Collective."""
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

    def _wait_for_sends(self, chosen: Callable[[Instance], bool]) -> None:
        for instance, work in self._sends:
            if chosen(instance):
                work.wait()
        self._sends = [(instance, work) for instance, work in self._sends if not chosen(instance)]

    def _fetch(self, now: Sequence[Instance]) -> None:
        """Start the transfers of `now` and of the next predicted instances with replicas that are not already held.

        At most one instance per buffer.
        """
        assert self._replicas is not None
        window: list[Instance] = []
        coming = self._visits.coming(AHEAD, len(self._homes))
        for instance in itertools.chain(now, coming):
            if self._replicas.count(*instance) and instance not in window:
                window.append(instance)
                if len(window) == len(self._buffers):
                    break
        for instance in window:
            if instance not in self._held:
                self._start(instance, self._replicas.of(*instance), window)

    def _start(self, instance: Instance, replicas: InstanceReplicas, needed: Sequence[Instance]) -> None:
        layer = self._homes[instance[1]]
        arrival = _Arrival(self._free_buffer(needed), 0, [])
        self._held[instance] = arrival
        buffer = self._buffers[arrival.buffer]
        for tensor in buffer:
            # Slots are overwritten outside autograd; increasing the version makes backward raise if autograd saved one.
            torch.autograd.graph.increment_version(tensor)
        from_host: list[tuple[torch.Tensor, torch.Tensor]] = []
        from_peers: list[tuple[torch.Tensor, torch.Tensor]] = []
        messages: list[Message] = []
        rank, per_node = self._topology.rank, self._topology.ranks_per_node
        for replica in replicas.located(layer):
            is_here = replica.rank == rank
            slots = [tensor[replica.slot] for tensor in buffer] if is_here else []
            arrival.count += is_here
            if replica.path == HOST:
                if is_here:
                    from_host += zip(slots, self.mirror.row(layer.index, replica.expert), strict=True)
            elif self.peers is not None and replica.home // per_node == replica.rank // per_node:
                if is_here:
                    from_peers += zip(slots, self.peers.row(layer.index, replica.home, replica.row), strict=True)
                    self.counters.peer_bytes += layer.expert_bytes
            elif rank in (replica.home, replica.rank):
                tensors = slots or [source[replica.row] for source in layer.sources]
                messages += [Message(replica.home, replica.rank, tensor) for tensor in tensors]
                if not is_here:
                    self.counters.peer_bytes += layer.expert_bytes
            else:
                messages += [Message(replica.home, replica.rank, None)] * len(buffer)
        if from_host:
            arrival.waits.append(self.host_copies.start(from_host))
            self.counters.host_bytes += sum(source.nbytes for _, source in from_host)
        if from_peers:
            arrival.waits.append(self.peer_copies.start(from_peers))
        tag = message_tag((self._plan_number, *instance))
        for posted in post(messages, rank, self._topology.weights, tag=tag):
            # Compute does not wait for sends, whose sources change only after `complete`.
            if posted.receives:
                arrival.waits.append(posted.work.wait)
            else:
                self._sends.append((instance, posted.work))
        self._sends = [(of, work) for of, work in self._sends if not work.is_completed()]

    def _free_buffer(self, needed: Sequence[Instance]) -> int:
        """A free buffer, else that of the oldest instance that is not in `needed`."""
        taken = {arrival.buffer for arrival in self._held.values()}
        for buffer in range(len(self._buffers)):
            if buffer not in taken:
                return buffer
        oldest = next(key for key in self._held if key not in needed)
        arrival = self._held.pop(oldest)
        for wait in arrival.waits:
            wait()
        return arrival.buffer
