"""Optimizer state of single experts, which moves and is saved with them. `ExpertState`: all that moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.state.home_experts import ExpertTensor, HomeExperts, parameters_of

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
        """Whether the state is known and on the device; equal on all ranks."""
        ...

    def gradients_wait(self, layer: HomeExperts) -> bool:
        """Whether this rank's experts have gradients that no optimizer has used, which a move would lose."""
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
    """State of torch optimizers.

    Attributes:
        held: what the optimizers hold of a layer's tensor number t: the experts' Parameters, or copies of them.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    held: Callable[[HomeExperts, int], ExpertTensor] = lambda layer, t: layer.tensors[t]

    @property
    def may_move(self) -> bool:
        """See `ExpertState`."""
        return bool(self.optimizers)

    def gradients_wait(self, layer: HomeExperts) -> bool:
        """See `ExpertState`."""
        return any_nonzero(layer.gradients)

    def form(self, layer: HomeExperts, t: int) -> object:
        """See `ExpertState`."""
        tensor = self.held(layer, t)
        is_stack = isinstance(tensor, torch.Tensor)
        return [describe_state(optimizer, parameters_of(tensor)[0], is_stack=is_stack) for optimizer in self.optimizers]

    def rows(self, layer: HomeExperts) -> list[StateRows]:
        """See `ExpertState`."""
        return [
            rows
            for t in range(len(layer.likes))
            for tensor in [self.held(layer, t)]
            for optimizer in self.optimizers
            for rows in state_by_row(optimizer, tensor, name_of_tensor(layer, t), layer.home_experts)
        ]

    def part_bytes(self, layer: HomeExperts) -> int:
        """See `ExpertState`."""
        return 0

    def row_parts(self, layers: Sequence[HomeExperts]) -> list[list[RowParts]]:
        """See `ExpertState`. There are none."""
        return [[] for _ in layers]


def any_nonzero(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any element of any tensor is not 0. The host waits for the device once."""
    counts = [tensor.count_nonzero() for tensor in tensors]
    return bool(counts) and bool(torch.stack(counts).any())


def name_of_tensor(layer: HomeExperts, t: int) -> str:
    """A tensor of the experts, in errors."""
    return f"MoE layer {layer.index}, expert tensor {t}"


def expert_state(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, *, is_stack: bool
) -> dict[str, torch.Tensor]:
    """The tensors of a Parameter's optimizer state that belong to single experts. Not a collective.

    Single numbers, such as a step count, are shared by all experts and left out.

    Args:
        parameter: a stack of this rank's experts `[H, ...]`, or one expert's Parameter of a list `[...]`.

    Returns:
        The optimizer's tensors by key: `[H, ...]` for a stack, of any shape for a list. Empty before its first step.

    Raises:
        InputError: for state that is not a single number, and for a stack not one row for each expert, for a list not a
            tensor.
    """
    tensors = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        has_dimension = isinstance(value, torch.Tensor) and value.ndim > 0
        if has_dimension and (not is_stack or len(value) == len(parameter)):
            tensors[key] = value
        elif has_dimension or not isinstance(value, int | float | torch.Tensor):
            kind = f"shape {list(value.shape)}" if has_dimension else f"type {type(value).__name__}"
            wanted = f"have {len(parameter)} rows, one for each expert" if is_stack else "a tensor"
            raise InputError(
                f"{type(optimizer).__name__} keeps {key!r} of {kind} for an expert tensor {list(parameter.shape)}; it "
                f"should be a single number or {wanted}"
            )
    return tensors


def state_by_row(
    optimizer: torch.optim.Optimizer, tensor: ExpertTensor, where: str, home: Array
) -> list[torch.Tensor | list[torch.Tensor]]:
    """The optimizer state of single experts for one of their tensors, ordered by key as on all ranks.

    Args:
        where: the tensor's name in errors.
        home: logical ids `[H]` of its experts.

    Returns:
        Stacks `[H, ...]`, or lists of H tensors.

    Raises:
        InputError: as `expert_state`; if the states of a list's Parameters differ in keys, shapes, dtypes or numbers.
    """
    if isinstance(tensor, torch.Tensor):
        rows = expert_state(optimizer, tensor, is_stack=True)
        return [rows[key] for key in sorted(rows)]
    states = [expert_state(optimizer, parameter, is_stack=False) for parameter in tensor]
    first, *others = (describe_state(optimizer, parameter, is_stack=False) for parameter in tensor)
    for expert, other in zip(home[1:], others, strict=True):
        if other != first:
            raise InputError(
                f"{type(optimizer).__name__}: the state of {where} is {other or 'empty'} for expert {expert} and "
                f"{first or 'empty'} for expert {home[0]}; experts can move only if it is equal"
            )
    return [[state[key] for state in states] for key in sorted(states[0])]


def describe_state(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, *, is_stack: bool
) -> dict[str, object]:
    """The state that must be equal for all experts, by key: dtype and shape of an expert's tensors, single numbers.

    Args:
        parameter: a stack `[H, ...]`, or one of a list `[...]`.
    """
    tensors = expert_state(optimizer, parameter, is_stack=is_stack)
    return {
        key: (str(value.dtype), list(value.shape[is_stack:])) if key in tensors else float(value)
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
    }
