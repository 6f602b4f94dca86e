"""Returns of replica gradients on one process, with messages that arrive only when they are waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trimtab.runtime.program.physical_experts import InstanceReplicas
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer import returns
from trimtab.runtime.transfer.counters import Counters
from trimtab.runtime.transfer.returns import GradientReturns


class Peers:
    """A process group: a receive gets the next of `values` for each row when it is waited for."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.sent: list[torch.Tensor] = []
        self.waiting: list[torch.Tensor] = []

    def send(self, tensors: list[torch.Tensor], receiver: int, tag: int) -> Any:
        self.sent += tensors
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors: list[torch.Tensor], sender: int, tag: int) -> Any:
        (rows,) = tensors
        self.waiting.append(rows.fill_(float("nan")))
        values = [self.values.pop(0) for _ in rows]

        def arrive() -> None:
            self.waiting[:] = [other for other in self.waiting if other is not rows]
            rows.copy_(torch.tensor(values)[:, None])

        return SimpleNamespace(wait=arrive)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Peers:
    # The test runs outside of a backward.
    monkeypatch.setattr(returns, "accumulates", lambda layer, parameter: True)
    return Peers()


def make_layer(dtype: torch.dtype = torch.float32, tensor: Any = None, *, joins: bool = False) -> HomeExperts:
    """Rank 0 is home to experts 1 and 3 of 4."""
    tensors = [torch.nn.Parameter(torch.zeros(2, 2, dtype=dtype)) if tensor is None else tensor]
    return HomeExperts(0, lambda: tensors, rank=0, home_E=np.array([1, 0, 1, 0]), joins_in_backward=joins)


def first_column(layer: HomeExperts) -> list[float] | None:
    """The gradient, row by row."""
    grad = layer.parameters[0].grad
    return None if grad is None else grad[:, 0].tolist()


def make_returns(peers: Peers, layers: int, counters: Counters | None = None) -> GradientReturns:
    topology: Any = SimpleNamespace(gradients=peers, rank=0)
    return GradientReturns(topology, layers=layers, counters=counters or Counters())


def replicas(*experts_and_ranks: tuple[int, int]) -> InstanceReplicas:
    experts, ranks = np.array(experts_and_ranks, np.int64).reshape(-1, 2).T
    return InstanceReplicas(experts, ranks, np.zeros_like(ranks), np.zeros_like(ranks), np.zeros((len(ranks), 3)))


def test_replicas_of_one_expert_are_summed_in_float32_in_plan_order(peers: Peers) -> None:
    """In bfloat16 256 + 1 is 256; in float32 (1 - 1e8) + 1e8 is 0."""
    counters = Counters()
    under_way, layer = make_returns(peers, 2, counters), make_layer(torch.bfloat16)
    peers.values = [256, 1, 1]
    under_way.start(layer, [], replicas((1, 1), (1, 2), (1, 3)), 0)
    under_way.finish()
    assert first_column(layer) == [258, 0]
    peers.values, other = [1e8, -1e8, 1], make_layer()
    under_way.start(other, [], replicas((1, 1), (1, 2), (1, 3)), 0)
    under_way.finish()
    assert first_column(other) == [1, 0]
    under_way.start(layer, [torch.ones(1, 2, dtype=torch.bfloat16)], replicas((0, 0)), 0)
    assert peers.sent[0].dtype == torch.float32
    # Two values in float32.
    assert counters.gradient_bytes == 8


def test_oldest_is_added_first_and_reserved_memory_is_enough(peers: Peers) -> None:
    under_way, layer = make_returns(peers, layers=2), make_layer()
    under_way.reserve(layer, arriving=2)
    reserved = under_way.nbytes
    assert reserved == 2 * 2 * 2 * 4
    # In float32 (1 + 1e8) - 1e8 is 0, and (1e8 - 1e8) + 1 is 1.
    peers.values = [1, 0, 1e8, 0, -1e8, 0, 0, 0]
    for _ in range(4):
        under_way.start(layer, [], replicas((1, 1), (3, 1)), 0)
        assert len(peers.waiting) <= 2
        assert under_way.nbytes == reserved
    under_way.finish()
    assert under_way.nbytes == reserved
    assert first_column(layer) == [0, 0]


def test_joined_gradients_go_to_main_grad_or_to_autograd_once(peers: Peers) -> None:
    """A framework's experts: Megatron's parameters have a `main_grad`, others get the gradient from autograd."""
    experts = [torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(2)]
    main_grad = torch.full((2,), 0.5)
    experts[1].main_grad = main_grad  # type: ignore[attr-defined]
    under_way, layer = make_returns(peers, layers=1), make_layer(tensor=experts, joins=True)
    peers.values = [1, 2, 4]
    under_way.start(layer, [], replicas((3, 1), (1, 1), (3, 2)), 0)
    added = under_way.join_parameters(layer, layer.parameters)
    assert main_grad.tolist() == [5.5, 5.5]
    (first, second) = added
    assert second is None
    assert first is not None
    assert (first.dtype, first.tolist()) == (torch.bfloat16, [2, 2])
    # The end of the backward has nothing left to add.
    under_way.finish()
    assert main_grad.tolist() == [5.5, 5.5]
    assert [parameter.grad for parameter in experts] == [None, None]
