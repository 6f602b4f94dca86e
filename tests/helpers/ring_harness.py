"""A replica ring on one process, whose weights and replicas a test sets."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from helpers.late_copies import LateCopies
from trimtab.planner.replicas.paths import HOST, PEER
from trimtab.runtime.rows.instance_replicas import InstanceReplicas, PlanReplicas
from trimtab.runtime.transfer.counters import Counters
from trimtab.runtime.transfer.ring import ReplicaRing


class Harness:
    """A ring on rank 0, home of no expert. Replicas come from a mirror, with copies that run when they are waited for.

    Args:
        late_device: use the copies of the simulated accelerator that is installed (`helpers.late_device`), and copy
            every second replica from a neighbour's memory.

    Attributes:
        experts_MLP: of every instance those that have a replica on rank 0.
        fetched: instances in the order in which their weights were asked for.
    """

    def __init__(
        self, experts_MLP: Sequence[Sequence[Sequence[int]]], *, places: int, late_device: bool = False
    ) -> None:
        num_layers, num_experts = len(experts_MLP[0]), 5
        self.fetched: list[tuple[int, int]] = []
        self.weights = torch.rand(num_layers, num_experts, 3, 3)
        homes: list[Any] = [
            SimpleNamespace(
                index=index, home_E=np.ones(num_experts, np.int16), rows_E=np.arange(num_experts),
                device=torch.device("cpu"), expert_shapes=[torch.Size([3, 3])], expert_bytes=36, dtype=torch.float32,
            )
            for index in range(num_layers)
        ]  # fmt: skip
        topology: Any = SimpleNamespace(weights=None, rank=0, ranks_per_node=2, expert_control=None)
        mirror: Any = SimpleNamespace(row=lambda layer, expert: [self.weights[layer, expert]], is_used=False)
        self.ring = ReplicaRing(topology, homes, slots=2, buffers=places, mirror=mirror, counters=Counters())
        self._late_device = late_device
        if late_device:
            peers: Any = SimpleNamespace(row=lambda layer, home, row: [self.weights[layer, row]])
            self.ring.peers = peers
        else:
            self.ring.host_copies = LateCopies()  # type: ignore[assignment]
        self.plan(experts_MLP)

    def plan(self, experts_MLP: Sequence[Sequence[Sequence[int]]]) -> None:
        """Set the replicas of another plan."""
        self.ring.drain()
        self.experts_MLP = experts_MLP
        self.ring.prepare(cast(PlanReplicas, SimpleNamespace(of=self._of, count=self._count)), 0)

    def begin(self, micro_step: int) -> None:
        self._recorded(self.ring.begin, micro_step)

    def visit(self, micro_step: int, layer: int) -> torch.Tensor | None:
        """Run a layer, forward or backward, and check the weights of its replicas."""
        self._recorded(self.ring.prefetch, micro_step, layer)
        experts = self.experts_MLP[micro_step][layer]
        if not experts:
            return None
        (weights,) = self.ring.replicas(micro_step, layer)
        assert torch.equal(weights, self.weights[layer, experts]), "wrong weights"
        return weights

    def forward(self, micro_step: int) -> None:
        self.begin(micro_step)
        for layer in range(len(self.experts_MLP[0])):
            self.visit(micro_step, layer)

    def backward(self, micro_step: int) -> None:
        for layer in reversed(range(len(self.experts_MLP[0]))):
            self.visit(micro_step, layer)

    def step(self) -> None:
        """An optimizer step."""
        self.ring.quiesce()
        self.weights += 1

    def _recorded(self, call: Any, *args: int) -> None:
        before = set(self.ring._held)
        call(*args)
        self.fetched += [instance for instance in self.ring._held if instance not in before]

    def _count(self, micro_step: int, layer: int) -> int:
        return len(self.experts_MLP[micro_step][layer]) if 0 <= micro_step < len(self.experts_MLP) else 0

    def _of(self, micro_step: int, layer: int) -> InstanceReplicas:
        experts = self.experts_MLP[micro_step][layer]
        count = len(experts)
        from_peer = self._late_device and (np.array(experts, np.int64) + micro_step + layer) % 2 == 1
        return InstanceReplicas(
            np.array(experts, np.int64), np.zeros(count, np.int64), np.arange(count),
            np.where(from_peer, PEER, np.full(count, HOST)), np.ones((count, 2), np.int64),
        )  # fmt: skip
