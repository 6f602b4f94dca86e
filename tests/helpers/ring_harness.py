"""A replica ring on one process, whose weights and replicas a test sets."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from trimtab.planner.replicas.paths import HOST
from trimtab.runtime.program.physical_experts import InstanceReplicas, PlanReplicas
from trimtab.runtime.state.expert_places import ExpertPlaces
from trimtab.runtime.transfer.counters import Counters
from trimtab.runtime.transfer.ring import ReplicaRing
from trimtab.runtime.transfer.streams import Wait


class LateCopies:
    """Copies when the target is waited for, which is the last allowed moment."""

    def __init__(self) -> None:
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def start(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Wait:
        under_way = {target.data_ptr() for target, _ in self._late}
        assert all(target.data_ptr() not in under_way for target, _ in pairs), "two copies into one slot"
        self._late += pairs

        def wait() -> None:
            self._late = [late for late in self._late if all(late[0] is not target for target, _ in pairs)]
            for target, source in pairs:
                # Like the copying thread, without a new version of the target.
                np.copyto(target.view(torch.uint8).numpy(), source.detach().view(torch.uint8).numpy())

        return wait


class Harness:
    """A ring on rank 0, home of no expert. Replicas come from a mirror, with copies that run when they are waited for.

    Attributes:
        experts_MLP: of every instance those that have a replica on rank 0.
        fetched: instances in the order in which their weights were asked for.
        late: of these, the ones that were asked for when their layer ran.
    """

    def __init__(self, experts_MLP: Sequence[Sequence[Sequence[int]]], *, places: int) -> None:
        num_layers, num_experts = len(experts_MLP[0]), 5
        self.fetched: list[tuple[int, int]] = []
        self.late: list[tuple[int, int]] = []
        self.weights = torch.rand(num_layers, num_experts, 3, 3)
        homes: list[Any] = [
            SimpleNamespace(
                index=index, places=ExpertPlaces(np.ones(num_experts, np.int16), np.arange(num_experts)),
                device=torch.device("cpu"), expert_shapes=[torch.Size([3, 3])], expert_bytes=36, dtype=torch.float32,
            )
            for index in range(num_layers)
        ]  # fmt: skip
        topology: Any = SimpleNamespace(weights=None, rank=0, ranks_per_node=2, expert_control=None)
        mirror: Any = SimpleNamespace(row=lambda layer, expert: [self.weights[layer, expert]], is_used=False)
        self.ring = ReplicaRing(topology, homes, buffers=places, mirror=mirror, counters=Counters())
        self.ring.host_copies = LateCopies()  # type: ignore[assignment]
        self.plan(experts_MLP)

    def plan(self, experts_MLP: Sequence[Sequence[Sequence[int]]]) -> None:
        """Set the replicas of another plan."""
        self.ring.drain()
        self.experts_MLP = experts_MLP
        self.ring.prepare(cast(PlanReplicas, SimpleNamespace(of=self._of, count=self._count, may_have_any=True)), 0, 2)

    def visit(self, micro_step: int, layer: int) -> torch.Tensor | None:
        """Run a layer, forward or backward, and check the weights of its replicas."""
        before = len(self.fetched)
        self.ring.prefetch(micro_step, layer)
        self.late += [instance for instance in self.fetched[before:] if instance == (micro_step, layer)]
        experts = self.experts_MLP[micro_step][layer]
        if not experts:
            return None
        (weights,) = self.ring.replicas(micro_step, layer)
        assert torch.equal(weights, self.weights[layer, experts]), "wrong weights"
        return weights

    def forward(self, micro_step: int) -> None:
        self.ring.begin(micro_step)
        for layer in range(len(self.experts_MLP[0])):
            self.visit(micro_step, layer)

    def backward(self, micro_step: int) -> None:
        for layer in reversed(range(len(self.experts_MLP[0]))):
            self.visit(micro_step, layer)

    def step(self) -> None:
        """An optimizer step."""
        self.ring.quiesce()
        self.weights += 1

    def _count(self, micro_step: int, layer: int) -> int:
        return len(self.experts_MLP[micro_step][layer]) if 0 <= micro_step < len(self.experts_MLP) else 0

    def _of(self, micro_step: int, layer: int) -> InstanceReplicas:
        # The ring asks for the replicas whose transfers it starts.
        self.fetched.append((micro_step, layer))
        experts = self.experts_MLP[micro_step][layer]
        count = len(experts)
        return InstanceReplicas(
            np.array(experts, np.int64), np.zeros(count, np.int64), np.arange(count),
            np.full(count, HOST), np.ones((count, 2), np.int64),
        )  # fmt: skip
