"""Renumbering: what every rank holds of all experts, router rows say, gets the order that moving experts get."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.state.expert_places import ExpertPlaces
from trimtab.runtime.state.home_experts import ByExpert
from trimtab.runtime.state.named_rows import instances_of
from trimtab.runtime.state.optimizer_rows import any_nonzero

OnRenumber = Callable[[int, Array], None]
"""Called with the number of a layer and its order `[E]`, old ids by new ones."""


def places_before(first: ExpertPlaces, order_E: Array) -> ExpertPlaces:
    """Places by old ids, where new id e is at the first place of id e."""
    home_E, rows_E = np.empty_like(first.home_E), np.empty_like(first.rows_E)
    home_E[order_E], rows_E[order_E] = first.home_E, first.rows_E
    return ExpertPlaces(home_E, rows_E)


def check_order(order_LE: Array, shape: tuple[int, int], groups_L: Sequence[int]) -> None:
    """Raise InputError unless it has an order of all experts for each layer, in which those of a group, of so many,
    stay together."""
    order_LE = np.asarray(order_LE)
    if order_LE.shape != shape or (np.sort(order_LE, axis=1) != np.arange(shape[1])).any():
        raise InputError(
            f"order_LE has shape {list(order_LE.shape)}; it should have {shape[0]} rows, each with the ids 0 to "
            f"{shape[1] - 1} of a layer's experts in another order"
        )
    for layer, (order_E, groups) in enumerate(zip(order_LE, groups_L, strict=True)):
        groups_GN = order_E.reshape(groups, -1) // (shape[1] // groups)
        if (groups_GN != groups_GN[:, :1]).any():
            raise InputError(
                f"order_LE splits a group of experts of MoE layer {layer}: its router first chooses among {groups} "
                "groups, so experts change places in their group, and groups as wholes"
            )


def tensors_by_expert(layer: int, by_expert: ByExpert | None, num_experts: int) -> list[torch.Tensor]:
    """What is permuted of a layer beside its experts: the declared tensors, and state that optimizers have of them.

    Raises:
        InputError: if nothing was declared, a tensor has not a row for each expert, or an optimizer's state is neither
            single numbers nor rows.
        RuntimeError: if a gradient would be lost.
    """
    if by_expert is None:
        raise InputError(
            f"MoE layer {layer} can't be renumbered: nothing says what its router has of each expert; add it with "
            "add_layer(..., by_expert=[router.weight, ...])"
        )
    declared = list(by_expert() if callable(by_expert) else by_expert)
    for tensor in declared:
        if hasattr(tensor, "to_local"):
            raise InputError(
                f"MoE layer {layer} can't be renumbered: FSDP shards a tensor of its router; renumber the checkpoint "
                "instead (trimtab renumber)"
            )
        if not tensor.ndim or len(tensor) != num_experts:
            raise InputError(
                f"MoE layer {layer}: by_expert has a tensor of shape {list(tensor.shape)}; it should have "
                f"{num_experts} rows, one for each expert"
            )
    if any_nonzero([tensor.grad for tensor in declared if tensor.grad is not None]):
        raise RuntimeError(
            f"the router of MoE layer {layer} has gradients that wait for an optimizer step; call zero_grad() before "
            "renumber()"
        )
    return declared + [
        value
        for optimizer in instances_of(torch.optim.Optimizer)
        for tensor in declared
        for value in _state_of(optimizer, tensor, layer)
    ]


def _state_of(optimizer: torch.optim.Optimizer, tensor: torch.Tensor, layer: int) -> Iterator[torch.Tensor]:
    for key, value in sorted(optimizer.state.get(tensor, {}).items()):
        has_dimension = isinstance(value, torch.Tensor) and value.ndim > 0
        if has_dimension and len(value) == len(tensor):
            yield value
        elif has_dimension or not isinstance(value, int | float | torch.Tensor):
            raise InputError(
                f"MoE layer {layer} can't be renumbered: {type(optimizer).__name__} keeps {key!r} of a router's tensor "
                f"{list(tensor.shape)}, which has not a row for each expert"
            )


@torch.no_grad()
def permute(tensors: Sequence[torch.Tensor], order_E: Array) -> None:
    """Permute rows in place."""
    for tensor in tensors:
        tensor.copy_(tensor.detach()[torch.from_numpy(order_E).to(tensor.device)])
