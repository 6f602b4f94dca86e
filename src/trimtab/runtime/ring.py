"""`ReplicaRing`: brings replicas' weights to where they are needed, a few layers ahead, and drops them behind.

All layers share the ring's places, so that memory does not grow with depth; what was dropped comes again in backward.
Every rank starts the same instances in the same order, whether or not it holds a replica of them: home ranks and slots
know of each other from the plan alone, and messages between two ranks match in the order in which they are posted.

Weights come from the node's mirror, out of a neighbour's memory where that can be reached, else as a message. Tests
without a GPU reach all three, but messages and copies on a GPU are ordered by streams, which no test here sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trimtab.planner.paths import HOST
from trimtab.runtime.copies import BackgroundCopies, Wait
from trimtab.runtime.counters import Counters
from trimtab.runtime.home_experts import HomeExperts
from trimtab.runtime.micro_step import MicroStep
from trimtab.runtime.mirror import NodeMirror
from trimtab.runtime.symmetric import PeerMemory
from trimtab.runtime.topology import Topology


@dataclass(eq=False)
class _Arrival:
    """The replicas of an instance on this rank: a place of the ring, and what to wait for."""

    place: int
    waits: list[Wait]


class ReplicaRing:
    """The places, and the transfers into them.

    Attributes:
        mirror: what host-path replicas are copied from.
        peers: what peer-path replicas with a home on this node are copied from; messages bring them if it is None.

    Args:
        expert: the tensors of one expert, shapes and dtypes alone.
        slots: replicas of one layer that a place has room for.
        layers: places, for a layer each. One is in use, the others are filled meanwhile; at least 2.
    """

    def __init__(
        self,
        topology: Topology,
        expert: Sequence[torch.Tensor],
        *,
        slots: int,
        layers: int,
        mirror: NodeMirror,
        counters: Counters,
    ) -> None:
        self.counters = counters
        self.mirror = mirror
        self.peers: PeerMemory | None = None
        self._topology = topology
        self._places = [
            [torch.zeros(slots, *t.shape, dtype=t.dtype, device=t.device) for t in expert] for _ in range(layers)
        ]
        self._device = expert[0].device
        # Of their own each, so that neither path waits for the other's link.
        self.host_copies, self.peer_copies = BackgroundCopies(self._device), BackgroundCopies(self._device)
        self._held: dict[tuple[MicroStep, int], _Arrival] = {}
        self._sends: list[dist.Work] = []
        self._order: dict[bool, list[int]] = {}

    @property
    def nbytes(self) -> int:
        """Memory of all places."""
        return sum(tensor.nbytes for place in self._places for tensor in place)

    def begin(self, step: MicroStep, layers: Sequence[HomeExperts]) -> None:
        """Say that a micro-step begins; start what its first layers need, beside all that runs before them."""
        if step.layouts:
            # Whether it has a backward shows later. Forward it runs like the last one of either kind.
            order = self._order.get(True) or self._order.get(False) or range(len(step.layouts))
            self._fetch(step, order, layers)

    def approach(self, step: MicroStep, index: int, layers: Sequence[HomeExperts]) -> None:
        """Say that layer `index` is about to run, forward or backward; start what comes next, as far as room goes."""
        step.visited.append(index)
        self._fetch(step, [index, *self._coming(step, index)], layers)

    def replicas(self, step: MicroStep, index: int) -> list[torch.Tensor]:
        """This rank's replicas of an instance that was approached, `[count, ...]` each. Waits until they are there."""
        arrival = self._held[step, index]
        if arrival.waits:
            self.counters.wait(arrival.waits, self._device)
            arrival.waits = []
        count = step.layouts[index].num_here
        return [tensor[:count] for tensor in self._places[arrival.place]]

    def end(self, step: MicroStep) -> None:
        """The micro-step is over: remember its order of layers. What follows may write to the weights."""
        if step.visited:
            self._order[step.with_backward] = step.visited
        self._wait_for_sends()

    def complete(self) -> None:
        """Wait for all transfers under way: the weights are about to change."""
        for arrival in self._held.values():
            for wait in arrival.waits:
                wait()
            arrival.waits = []
        self._wait_for_sends()

    def drain(self) -> None:
        """Forget all replicas, with no transfer left under way."""
        self.complete()
        self._held.clear()

    def _wait_for_sends(self) -> None:
        for work in self._sends:
            work.wait()
        self._sends.clear()

    def settle(self) -> None:
        """Come to where no rank reads what any rank is about to write. Collective."""
        self.drain()
        if self.peers is not None or self.mirror.is_used:
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier(group=self._topology.expert_control)

    def refresh(self, layers: Sequence[HomeExperts]) -> None:
        """Bring the layers' present weights to where replicas are copied from. Collective; all ranks have settled."""
        if self.peers is not None:
            self.peers.fill(layers)
        self.counters.mirror_bytes += self.mirror.refresh(layers)

    def take_cpu_s(self) -> float:
        """Seconds of CPU time that copying threads have spent since this was last asked."""
        return self.host_copies.take_cpu_s() + self.peer_copies.take_cpu_s()

    def close(self) -> None:
        """Give up threads and shared memory."""
        self.drain()
        for copies in (self.host_copies, self.peer_copies):
            copies.close()
        self.peers = None
        self.mirror.close()

    def _coming(self, step: MicroStep, index: int) -> Sequence[int]:
        """The layers that will be needed after this one: as in the last such micro-step, else straight on."""
        known, done = self._order.get(step.with_backward, []), len(step.visited)
        if known is not step.visited and known[:done] == step.visited:
            return known[done:]
        goes_up = done < 2 or index > step.visited[-2]
        return range(index + 1, len(step.layouts)) if goes_up else range(index - 1, -1, -1)

    def _fetch(self, step: MicroStep, order: Sequence[int], layers: Sequence[HomeExperts]) -> None:
        """Start what is not there yet of the first layers in this order that have replicas, one for each place."""
        window: list[int] = []
        for layer in order:
            if step.layouts[layer].replicas.count and layer not in window:
                window.append(layer)
                if len(window) == len(self._places):
                    break
        for layer in window:
            if (step, layer) not in self._held:
                self._start(step, layers[layer], {(step, needed) for needed in window})

    def _start(self, step: MicroStep, layer: HomeExperts, needed: set[tuple[MicroStep, int]]) -> None:
        replicas = step.layouts[layer.index].replicas
        arrival = _Arrival(self._free_place(needed), [])
        self._held[step, layer.index] = arrival
        place = self._places[arrival.place]
        for tensor in place:
            # So that autograd notices if it kept a slot that now gets other weights.
            torch.autograd.graph.increment_version(tensor)
        from_host: list[tuple[torch.Tensor, torch.Tensor]] = []
        from_peers: list[tuple[torch.Tensor, torch.Tensor]] = []
        operations: list[dist.P2POp] = []
        group, rank, per_node = self._topology.weights, self._topology.rank, self._topology.ranks_per_node
        # A message of another instance does not match, should ranks ever come to different ones.
        tag = hash((step.plan_number, step.index, layer.index)) & 0x7FFFFFFF
        for p in range(replicas.count):
            expert, to = int(replicas.experts[p]), int(replicas.ranks[p])
            home, row, slot = int(layer.home_E[expert]), int(layer.rows_E[expert]), int(replicas.slots[p])
            if replicas.paths[p] == HOST:
                if to == rank:
                    sources = self.mirror.row(layer.index, expert)
                    from_host += [(t[slot], source) for t, source in zip(place, sources, strict=True)]
            elif self.peers is not None and home // per_node == to // per_node:
                if to == rank:
                    sources = self.peers.row(layer.index, home, row)
                    from_peers += [(t[slot], source) for t, source in zip(place, sources, strict=True)]
                    self.counters.peer_bytes += layer.expert_bytes
            elif home == rank:
                operations += [
                    dist.P2POp(dist.isend, t[row], group=group, group_peer=to, tag=tag) for t in layer.sources
                ]
                self.counters.peer_bytes += layer.expert_bytes
            elif to == rank:
                operations += [dist.P2POp(dist.irecv, t[slot], group=group, group_peer=home, tag=tag) for t in place]
        if from_host:
            arrival.waits.append(self.host_copies.start(from_host))
            self.counters.host_bytes += sum(source.nbytes for _, source in from_host)
        if from_peers:
            arrival.waits.append(self.peer_copies.start(from_peers))
        works = dist.batch_isend_irecv(operations) if operations else []
        if self._device.type == "cuda":
            arrival.waits += [work.wait for work in works]
        else:
            for operation, work in zip(operations, works, strict=True):
                if operation.op is dist.irecv:
                    arrival.waits.append(work.wait)
                else:
                    self._sends.append(work)
        self._sends = [work for work in self._sends if not work.is_completed()]

    def _free_place(self, needed: set[tuple[MicroStep, int]]) -> int:
        """A place that is empty, or whose instance was not needed for longest."""
        taken = {arrival.place for arrival in self._held.values()}
        for place in range(len(self._places)):
            if place not in taken:
                return place
        oldest = next(key for key in self._held if key not in needed)
        arrival = self._held.pop(oldest)
        for wait in arrival.waits:
            wait()
        return arrival.place
