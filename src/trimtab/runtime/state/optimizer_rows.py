"""What an optimizer keeps of single experts: the part of its state that moves and is saved with them."""

from __future__ import annotations

import torch

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.state.home_experts import ExpertTensor


def rows_of_state(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """The part of a stack's optimizer state that belongs to single experts. Not a collective.

    Single numbers, such as a step count, belong to all experts alike and are left out.

    Args:
        parameter: this rank's experts, `[H, ...]`.

    Returns:
        Tensors `[H, ...]` by key, the optimizer's own. Empty before its first step.

    Raises:
        InputError: for state that is neither one row for each expert nor a single number.
    """
    rows = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == len(parameter):
            rows[key] = value
        elif not _is_number(value):
            raise InputError(
                f"{type(optimizer).__name__} keeps {key!r} of {_kind(value)} for an expert tensor "
                f"{list(parameter.shape)}; it should be a single number or have {len(parameter)} rows, one for each "
                "expert"
            )
    return rows


def tensors_of_state(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """The tensors of the optimizer state of one Parameter of a list, without single numbers. Not a collective.

    Args:
        parameter: one expert's, `[...]`.

    Returns:
        The optimizer's own tensors by key, of any shape. Empty before its first step.

    Raises:
        InputError: for state that is neither a tensor nor a single number.
    """
    tensors = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, torch.Tensor) and value.ndim > 0:
            tensors[key] = value
        elif not _is_number(value):
            raise InputError(
                f"{type(optimizer).__name__} keeps {key!r} of {_kind(value)} for an expert tensor "
                f"{list(parameter.shape)}; it should be a single number or a tensor"
            )
    return tensors


def state_by_row(
    optimizer: torch.optim.Optimizer, tensor: ExpertTensor, where: str, home: Array
) -> list[torch.Tensor | list[torch.Tensor]]:
    """All that an optimizer keeps of single experts for one tensor of theirs, in an order that all ranks share.

    Args:
        where: what errors call the tensor.
        home: logical ids `[H]` of its experts.

    Returns:
        Stacks `[H, ...]`, or lists of H tensors.

    Raises:
        InputError: as `rows_of_state` and `tensors_of_state`; if the states of a list's Parameters are not alike.
    """
    if isinstance(tensor, torch.Tensor):
        rows = rows_of_state(optimizer, tensor)
        return [rows[key] for key in sorted(rows)]
    states = [tensors_of_state(optimizer, parameter) for parameter in tensor]
    first, *others = (describe_state(optimizer, parameter, is_stack=False) for parameter in tensor)
    for expert, other in zip(home[1:], others, strict=True):
        if other != first:
            raise InputError(
                f"{type(optimizer).__name__}: the state of {where} is {other or 'empty'} for expert {expert} and "
                f"{first or 'empty'} for expert {home[0]}; experts can move only if it is alike"
            )
    return [[state[key] for state in states] for key in sorted(states[0])]


def describe_state(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, *, is_stack: bool
) -> dict[str, object]:
    """What should be alike for all experts, by key: dtype and shape of one expert's tensors, and single numbers.

    Args:
        parameter: a stack `[H, ...]`, or one of a list `[...]`.
    """
    tensors = rows_of_state(optimizer, parameter) if is_stack else tensors_of_state(optimizer, parameter)
    return {
        key: (str(value.dtype), list(value.shape[is_stack:])) if key in tensors else float(value)
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.ndim == 0)


def _kind(value: object) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"
