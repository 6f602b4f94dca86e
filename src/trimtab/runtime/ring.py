"""`ReplicaRing`: brings replicas' weights to where they are needed, a few layers ahead, and drops them behind.

All layers share the ring's places, so that memory does not grow with depth; what was dropped comes again in backward.
Every rank starts the same instances in the same order, whether or not it holds a replica of them: home ranks and slots
know of each other from the plan alone, and messages between two ranks match in the order in which they are posted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from trimtab.planner.paths import HOST
from trimtab.runtime.copies import BackgroundCopies, Wait
from trimtab.runtime.counters import Counters
from trimtab.runtime.mirror import NodeMirror
from trimtab.runtime.topology import Topology

if TYPE_CHECKING:
    from trimtab.runtime.binding import MicroStep
    from trimtab.runtime.layer import ExpertLayer


@dataclass(eq=False)
class _Arrival:
    """The replicas of an instance on this rank: a place of the ring, and what to wait for."""

    place: int
    waits: list[Wait]


class ReplicaRing:
    """The places, and the transfers into them.

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
        self._topology = topology
        self._places = [
            [torch.zeros(slots, *t.shape, dtype=t.dtype, device=t.device) for t in expert] for _ in range(layers)
        ]
        self._device = expert[0].device
        self.copies = BackgroundCopies(self._device)
        self._held: dict[tuple[MicroStep, int], _Arrival] = {}
        self._sends: list[dist.Work] = []
        self._order: dict[bool, list[int]] = {}

    @property
    def nbytes(self) -> int:
        """Memory of all places."""
        return sum(tensor.nbytes for place in self._places for tensor in place)

    def approach(self, step: MicroStep, index: int, layers: Sequence[ExpertLayer]) -> None:
        """Say that layer `index` is about to run, forward or backward; start what comes next, as far as room goes."""
        step.visited.append(index)
        coming = self._coming(step, index)
        window = [index] if step.layouts[index].replicas.count else []
        for layer in coming:
            if len(window) == len(self._places):
                break
            if step.layouts[layer].replicas.count and layer not in window:
                window.append(layer)
        for layer in window:
            if (step, layer) not in self._held:
                self._start(step, layers[layer], {(step, needed) for needed in window})

    def replicas(self, step: MicroStep, index: int) -> list[torch.Tensor]:
        """This rank's replicas of an instance that was approached, `[count, ...]` each. Waits until they are there."""
        arrival = self._held[step, index]
        if arrival.waits:
            self.counters.wait(arrival.waits, self._device)
            arrival.waits = []
        count = step.layouts[index].num_here
        return [tensor[:count] for tensor in self._places[arrival.place]]

    def end(self, step: MicroStep) -> None:
        """The micro-step is over: remember its order of layers."""
        if step.visited:
            self._order[step.with_backward] = step.visited

    def drain(self) -> None:
        """Forget all replicas, with no transfer left under way: the weights are about to change."""
        for arrival in self._held.values():
            for wait in arrival.waits:
                wait()
        self._held.clear()
        for work in self._sends:
            work.wait()
        self._sends.clear()

    def refresh(self, layers: Sequence[ExpertLayer]) -> None:
        """Bring the layers' present weights into all nodes' mirrors. Collective; all ranks have drained."""
        self.counters.mirror_bytes += self.mirror.refresh(
            np.stack([layer.home_E for layer in layers]),
            [layer.sources for layer in layers],
            np.stack([layer.rows_E for layer in layers]),
        )

    def _coming(self, step: MicroStep, index: int) -> Sequence[int]:
        """The layers that will be needed after this one: as in the last such micro-step, else straight on."""
        known, done = self._order.get(step.with_backward, []), len(step.visited)
        if known[:done] == step.visited:
            return known[done:]
        goes_up = done < 2 or index > step.visited[-2]
        return range(index + 1, len(step.layouts)) if goes_up else range(index - 1, -1, -1)

    def _start(self, step: MicroStep, layer: ExpertLayer, needed: set[tuple[MicroStep, int]]) -> None:
        replicas = step.layouts[layer.index].replicas
        arrival = _Arrival(self._free_place(needed), [])
        self._held[step, layer.index] = arrival
        place = self._places[arrival.place]
        for tensor in place:
            # So that autograd notices if it kept a slot that now gets other weights.
            torch.autograd.graph.increment_version(tensor)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        operations: list[dist.P2POp] = []
        group, rank = self._topology.weights, self._topology.rank
        for p in range(replicas.count):
            expert, to = int(replicas.experts[p]), int(replicas.ranks[p])
            home, row, slot = int(layer.home_E[expert]), int(layer.rows_E[expert]), int(replicas.slots[p])
            if replicas.paths[p] == HOST:
                if to == rank:
                    copies += [(t[slot], s) for t, s in zip(place, self.mirror.row(layer.index, expert), strict=True)]
            elif home == rank:
                operations += [dist.P2POp(dist.isend, t[row], group=group, group_peer=to) for t in layer.sources]
                self.counters.peer_bytes += layer.expert_bytes
            elif to == rank:
                operations += [dist.P2POp(dist.irecv, t[slot], group=group, group_peer=home) for t in place]
        if copies:
            arrival.waits.append(self.copies.start(copies))
            self.counters.host_bytes += sum(source.nbytes for _, source in copies)
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
