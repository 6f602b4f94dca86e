"""The ring alone, on one process, with copies that are not made before somebody waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.late_copies import LateCopies
from trimtab.planner.paths import HOST
from trimtab.runtime.counters import Counters
from trimtab.runtime.layout import InstanceReplicas
from trimtab.runtime.micro_step import MicroStep
from trimtab.runtime.ring import ReplicaRing


class Harness:
    """A ring on rank 0 whose replicas all come from a mirror; `fetched` lists the layers in order."""

    def __init__(self, num_layers: int, *, ring_layers: int, slots: int = 2, num_experts: int = 5) -> None:
        self.fetched: list[int] = []
        self.weights = torch.rand(num_layers, num_experts, 3, 3)
        self.layers: list[Any] = [
            SimpleNamespace(index=index, home_E=np.ones(num_experts, np.int16), rows_E=np.arange(num_experts))
            for index in range(num_layers)
        ]
        topology: Any = SimpleNamespace(weights=None, rank=0, ranks_per_node=2)
        mirror: Any = SimpleNamespace(row=self._row)
        expert = [self.weights[0, 0]]
        self.ring = ReplicaRing(topology, expert, slots=slots, layers=ring_layers, mirror=mirror, counters=Counters())
        self.ring.host_copies = LateCopies()  # type: ignore[assignment]

    def step(self, experts_L: Sequence[Sequence[int]], *, with_backward: bool = True) -> MicroStep:
        """A micro-step with replicas of these experts on rank 0 in each layer."""
        layouts: list[Any] = []
        for experts in experts_L:
            count = len(experts)
            replicas = InstanceReplicas(
                np.array(experts, np.int64), np.zeros(count, np.int64), np.arange(count),
                np.full(count, HOST), np.ones((count, 2), np.int64),
            )  # fmt: skip
            layouts.append(SimpleNamespace(replicas=replicas, num_here=count))
        return MicroStep(None, layouts=layouts, with_backward=with_backward)

    def visit(self, step: MicroStep, layer: int) -> torch.Tensor | None:
        """Come to a layer as its forward or backward does, and check that the right weights are there."""
        self.ring.approach(step, layer, self.layers)
        experts = step.layouts[layer].replicas.experts
        if not len(experts):
            return None
        (weights,) = self.ring.replicas(step, layer)
        assert torch.equal(weights, self.weights[layer, experts])
        return weights

    def _row(self, layer: int, expert: int) -> list[torch.Tensor]:
        if self.fetched[-1:] != [layer]:
            self.fetched.append(layer)
        return [self.weights[layer, expert]]


def test_every_layer_finds_its_own_replicas_in_whatever_order_it_runs() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        num_layers = int(rng.integers(1, 8))
        harness = Harness(num_layers, ring_layers=int(rng.integers(2, 5)))
        for _ in range(4):
            experts_L = [rng.permutation(5)[: rng.integers(0, 3)].tolist() for _ in range(num_layers)]
            step = harness.step(experts_L, with_backward=bool(rng.integers(2)))
            forward = np.arange(num_layers)
            orders = (np.concatenate([forward, forward[::-1]]), np.concatenate([forward, np.repeat(forward[::-1], 2)]))
            order = orders[rng.integers(2)] if rng.integers(2) else rng.integers(0, num_layers, 2 * num_layers)
            for layer in order[: rng.integers(1, len(order) + 1)]:
                harness.visit(step, int(layer))
            harness.ring.end(step)
            if rng.integers(2):
                harness.ring.drain()
                harness.weights += 1


def test_weights_come_ahead_of_their_layer_and_no_oftener_than_needed() -> None:
    harness = Harness(5, ring_layers=3)
    step = harness.step([[0], [1], [2], [3], [4]])
    ahead = {0: [0, 1, 2], 1: [0, 1, 2, 3], 2: [0, 1, 2, 3, 4]}
    for layer in range(5):
        harness.visit(step, layer)
        assert harness.fetched == ahead.get(layer, [0, 1, 2, 3, 4])
    # Three layers are still there when backward begins.
    again = {4: [], 3: [1]}
    for layer in (4, 3, 2, 1, 0):
        harness.visit(step, layer)
        assert harness.fetched[5:] == again.get(layer, [1, 0])


def test_the_first_layers_are_fetched_as_the_micro_step_begins() -> None:
    harness = Harness(5, ring_layers=3)
    step = harness.step([[], [1], [2], [], [4]])
    harness.ring.begin(step, harness.layers)
    assert harness.fetched == [1, 2, 4]
    for layer in range(5):
        harness.visit(step, layer)
    assert harness.fetched == [1, 2, 4]
    harness.ring.end(step)
    unplanned = MicroStep(None)
    harness.ring.begin(unplanned, harness.layers)
    assert harness.fetched == [1, 2, 4]


def test_a_micro_step_begins_as_the_last_one_ran() -> None:
    harness = Harness(4, ring_layers=2)
    experts_L = [[0], [1], [2], [3]]
    step = harness.step(experts_L)
    for layer in (3, 1, 2, 0):
        harness.visit(step, layer)
    harness.ring.end(step)
    harness.fetched.clear()
    harness.ring.begin(harness.step(experts_L, with_backward=False), harness.layers)
    assert harness.fetched == [3, 1]


def test_the_order_of_the_last_micro_step_of_its_kind_is_expected_again() -> None:
    harness = Harness(5, ring_layers=3)
    experts_L = [[0], [1], [2], [3], [4]]
    for order, with_backward in (([0, 2, 4, 1, 3], True), ([0, 1, 2, 3, 4], False)):
        step = harness.step(experts_L, with_backward=with_backward)
        for layer in order:
            harness.visit(step, layer)
        harness.ring.end(step)
    harness.fetched.clear()
    harness.visit(harness.step(experts_L), 0)
    assert harness.fetched == [0, 2, 4]


def test_drained_replicas_are_fetched_anew() -> None:
    harness = Harness(2, ring_layers=2)
    step = harness.step([[1], [2]])
    harness.visit(step, 0)
    harness.ring.drain()
    harness.weights += 1
    harness.visit(step, 0)
    harness.visit(step, 1)


def test_autograd_notices_a_slot_that_got_other_weights() -> None:
    harness = Harness(3, ring_layers=2)
    step = harness.step([[0], [1], [2]])
    weights = harness.visit(step, 0)
    assert weights is not None
    rows = torch.rand(1, 3, requires_grad=True)
    kept = rows @ weights.detach()[0]
    harness.visit(step, 1)
    harness.visit(step, 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()
