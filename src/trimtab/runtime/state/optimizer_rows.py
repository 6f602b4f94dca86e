"""Optimizer state of single experts, which moves and is saved with them."""

from __future__ import annotations

import torch

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.state.home_experts import ExpertTensor


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
