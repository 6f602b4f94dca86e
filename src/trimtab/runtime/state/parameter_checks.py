"""Checks of a layer's expert parameters: when the layer is added, and when a micro-step begins."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.state.home_experts import ExpertTensor, HomeExperts, parameters_of


def check_new_parameters(
    index: int, tensors: Sequence[ExpertTensor], layers: Sequence[HomeExperts], home: Array
) -> None:
    """Check the tensors of a new layer.

    Args:
        index: the layer's number.
        layers: the session's layers before it.
        home: logical ids `[E / R]` of this rank's experts.

    Raises:
        InputError: if a tensor does not hold the rank's experts, has no memory, or shares memory with another one; if
            the Parameters of a list differ in shape, dtype or whether they are trained.
    """
    if not tensors:
        raise InputError(f"MoE layer {index} was added without expert tensors")
    for t, tensor in enumerate(tensors):
        if len(tensor) != len(home):
            kind, unit = ("tensor", "rows") if isinstance(tensor, torch.Tensor) else ("list", "tensors")
            raise InputError(
                f"MoE layer {index}: expert {kind} {t} has {len(tensor)} {unit}; this rank is home to {len(home)} "
                "experts"
            )
        for parameter, name in zip(parameters_of(tensor), _names_of(t, tensor, home), strict=True):
            if not isinstance(parameter, torch.Tensor):
                raise InputError(f"MoE layer {index}: {name} is of type {type(parameter).__name__}, not a Parameter")
            if parameter.is_meta:
                raise InputError(f"MoE layer {index}: {name} has no memory; load it before it is added")
        if not isinstance(tensor, torch.Tensor):
            _check_list(index, t, tensor, home)
    _check_memory(index, tensors, layers, home)


def check_current_parameters(layer: HomeExperts) -> None:
    """Raises InputError if the parameters of a layer differ in shape or dtype from those that were added, or have no
    memory."""
    home = layer.home_experts
    for t, (tensor, (shape, dtype)) in enumerate(zip(layer.tensors, layer.likes, strict=True)):
        is_stack = isinstance(tensor, torch.Tensor)
        if not is_stack and len(tensor) != shape[0]:
            raise InputError(
                f"MoE layer {layer.index}: expert tensor {t} was added as a list of {shape[0]} tensors and has "
                f"{len(tensor)} now"
            )
        like = shape if is_stack else shape[1:]
        for parameter, name in zip(parameters_of(tensor), _names_of(t, tensor, home), strict=True):
            where = f"MoE layer {layer.index}: {name}"
            if (parameter.shape, parameter.dtype) != (like, dtype):
                raise InputError(
                    f"{where} was added as {list(like)} {dtype} and is {list(parameter.shape)} {parameter.dtype} now; "
                    "convert the model before its experts are added to the session"
                )
            if parameter.is_meta or (parameter.numel() and parameter.untyped_storage().nbytes() == 0):
                raise InputError(f"{where} has no memory now; load or onload the experts before a micro-step")
        if not isinstance(tensor, torch.Tensor):
            _check_list(layer.index, t, tensor, home)


def _names_of(t: int, tensor: ExpertTensor, home: Array) -> list[str]:
    """Names in errors of the Parameters of one tensor."""
    if isinstance(tensor, torch.Tensor):
        return [f"expert tensor {t}"]
    return [f"expert tensor {t} of expert {expert}" for expert in home]


def _check_list(index: int, t: int, tensors: Sequence[torch.nn.Parameter], home: Array) -> None:
    """Raises InputError if the Parameters of a list differ in shape, dtype or whether they are trained."""
    first, *others = (f"{list(p.shape)} {p.dtype}, {'trained' if p.requires_grad else 'frozen'}" for p in tensors)
    for expert, other in zip(home[1:], others, strict=True):
        if other != first:
            raise InputError(
                f"MoE layer {index}: expert tensor {t} of expert {expert} is {other}, and {first} of expert {home[0]}; "
                "the tensors of a list should be equal in these"
            )


def _check_memory(index: int, tensors: Sequence[ExpertTensor], layers: Sequence[HomeExperts], home: Array) -> None:
    """Raises InputError if tensors of a new layer are in another layer, too, or overlap with others in memory."""
    spans = [(*_span(parameter), layer.index, "") for layer in layers for parameter in layer.parameters]
    for t, tensor in enumerate(tensors):
        for parameter, name in zip(parameters_of(tensor), _names_of(t, tensor, home), strict=True):
            spans.append((*_span(parameter), index, name))
    spans.sort()
    # If any spans overlap, so do two neighbours in this order.
    for (place, _, end, one, name), (other_place, start, _, other, other_name) in itertools.pairwise(spans):
        if place != other_place or start >= end or index not in (one, other):
            continue
        if one != other:
            raise InputError(
                f"MoE layer {index} was added with an expert tensor of MoE layer {min(one, other)}; layers can't share "
                "experts, since each places its own"
            )
        raise InputError(f"MoE layer {index}: {name} and {other_name} share memory; every expert needs its own")


def _span(parameter: torch.Tensor) -> tuple[str, int, int]:
    """Device, start and end of a contiguous tensor in memory. A tensor without memory gets a unique span."""
    start = parameter.data_ptr()
    if start == 0:
        return "none", id(parameter), id(parameter) + 1
    return str(parameter.device), start, start + parameter.nbytes
