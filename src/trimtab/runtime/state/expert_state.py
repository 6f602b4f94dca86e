"""`ExpertState`: what moves with experts beside their weights, such as what optimizers keep of each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trimtab.array_type import Array
from trimtab.runtime.state.home_experts import HomeExperts, parameters_of
from trimtab.runtime.state.optimizer_rows import describe_state, state_by_row

StateRows = torch.Tensor | list[torch.Tensor]
"""A tensor of all home experts: a stack `[H, ...]`, or H tensors `[...]`."""


@dataclass(frozen=True, eq=False)
class RowParts:
    """A tensor of all home experts of which the ranks with the same homes hold different parts.

    The elements of a row, one expert's, are numbered in memory order. All parts together have each element once.

    Attributes:
        parts: for each row this rank's part, one-dimensional, which may be empty.
        ranges_GH2: int64, for each expert-parallel group and row the first element of the part and the one after its
            last; the same on all ranks of a group.
    """

    parts: list[torch.Tensor]
    ranges_GH2: Array


class ExpertState(Protocol):
    """What moves with the experts of a session, beside their weights."""

    @property
    def may_move(self) -> bool:
        """Whether the state is known, and experts may move now; equal on all ranks."""
        ...

    def gradients_wait(self, layer: HomeExperts) -> bool:
        """Whether the layer has gradients that no optimizer has used, which a move would lose."""
        ...

    def form(self, layer: HomeExperts, t: int) -> object:
        """What has to be equal on all ranks before experts move: the form of the state for tensor number t.

        Raises:
            InputError: if the state can't move.
        """
        ...

    def rows(self, layer: HomeExperts) -> list[StateRows]:
        """State of which this rank has whole rows, in the same order on all ranks. Raises InputError as `form`."""
        ...

    def part_bytes(self, layer: HomeExperts) -> int:
        """Bytes of `row_parts` that a rank sends for one expert, about."""
        ...

    def row_parts(self, layers: Sequence[HomeExperts]) -> list[list[RowParts]]:
        """For each layer the state of which this rank has parts of rows, in the same order on all ranks. A collective
        over all data ranks."""
        ...


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """State of torch optimizers that hold the experts' Parameters."""

    optimizers: Sequence[torch.optim.Optimizer]

    @property
    def may_move(self) -> bool:
        """See `ExpertState`."""
        return bool(self.optimizers)

    def gradients_wait(self, layer: HomeExperts) -> bool:
        """See `ExpertState`."""
        return any(p.grad is not None and bool(p.grad.count_nonzero()) for p in layer.parameters)

    def form(self, layer: HomeExperts, t: int) -> object:
        """See `ExpertState`."""
        tensor = layer.tensors[t]
        is_stack = isinstance(tensor, torch.Tensor)
        return [describe_state(optimizer, parameters_of(tensor)[0], is_stack=is_stack) for optimizer in self.optimizers]

    def rows(self, layer: HomeExperts) -> list[StateRows]:
        """See `ExpertState`."""
        return [
            rows
            for t, tensor in enumerate(layer.tensors)
            for optimizer in self.optimizers
            for rows in state_by_row(optimizer, tensor, name_of_tensor(layer, t), layer.home_experts)
        ]

    def part_bytes(self, layer: HomeExperts) -> int:
        """See `ExpertState`."""
        return 0

    def row_parts(self, layers: Sequence[HomeExperts]) -> list[list[RowParts]]:
        """See `ExpertState`. There are none."""
        return [[] for _ in layers]


def name_of_tensor(layer: HomeExperts, t: int) -> str:
    """A tensor of the experts, in errors."""
    return f"MoE layer {layer.index}, expert tensor {t}"
