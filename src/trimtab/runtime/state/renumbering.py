"""Renumbering: what every rank holds of all experts, router rows say, gets the order of the experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.state.expert_places import ExpertPlaces
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.state.owners import check_owners, instances_of
from trimtab.trace.numbering import Numbering

# By Parameter of experts, the numbering of their weights that a session knows, and the decoder layer.
numberings: MutableMapping[torch.Tensor, tuple[Numbering | None, int]] = WeakIdKeyDictionary()

OnRenumber = Callable[[int, Array], None]
"""Called with the number of a layer and its order `[E]`, old ids by new ones."""


def places_after(now: ExpertPlaces, order_E: Array) -> ExpertPlaces:
    """Where the rows of experts go, by their ids now: each to the place of its new id."""
    home_E, rows_E = np.empty_like(now.home_E), np.empty_like(now.rows_E)
    home_E[order_E], rows_E[order_E] = now.home_E, now.rows_E
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


def tensors_by_expert(layer: HomeExperts) -> list[torch.Tensor]:
    """What is permuted of a layer beside its experts: the declared tensors, and state that torch's optimizers have of
    them.

    Raises:
        InputError: if nothing was declared, a tensor was replaced in the model or has not a row for each expert, or an
            optimizer's state is neither single numbers nor rows.
    """
    num_experts, declared = layer.num_experts, layer.declared
    if layer.by_expert is None:
        raise InputError(
            f"MoE layer {layer.index} can't be renumbered: nothing says what its router has of each expert. In a "
            "loop of your own, add it with add_layer(..., by_expert=[router.weight, ...]); Megatron's routers with "
            "tensors of their own are not known. Or renumber the checkpoint (trimtab renumber)"
        )
    check_owners(layer.index, declared)
    for tensor in declared:
        if hasattr(tensor, "to_local"):
            raise InputError(
                f"MoE layer {layer.index} can't be renumbered: FSDP shards a tensor of its router; renumber the "
                "checkpoint instead (trimtab renumber)"
            )
        if not tensor.ndim or len(tensor) != num_experts:
            raise InputError(
                f"MoE layer {layer.index}: by_expert has a tensor of shape {list(tensor.shape)}; it should have "
                f"{num_experts} rows, one for each expert"
            )
    # Wrappers of an optimizer, such as Accelerate's, have its state, too.
    optimizers = {id(each.state): each for each in instances_of(torch.optim.Optimizer) if hasattr(each, "state")}
    return declared + [
        value
        for optimizer in optimizers.values()
        for tensor in declared
        for value in _state_of(optimizer, tensor, layer.index)
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
