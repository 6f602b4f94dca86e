"""Checks of a layer's expert parameters: when the layer is added, and when a micro-step begins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.state.home_experts import ExpertTensor, HomeExperts, parameters_of
from trimtab.runtime.state.owners import check_owners

DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64
_Form = tuple[torch.Size, torch.dtype, bool]


def check_new_parameters(
    index: int, tensors: Sequence[ExpertTensor], layers: Sequence[HomeExperts], home: Array
) -> None:
    """Check the tensors of a new layer.

    Args:
        index: the layer's number.
        layers: the session's layers before it.
        home: ids `[E / R]` of this rank's experts.

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
    for _, parameter, name in _named(tensors, home):
        _check_is_parameter(index, parameter, name)
        if parameter.is_meta:
            raise InputError(f"MoE layer {index}: {name} has no memory; load it before it is added")
        if parameter.dtype not in DTYPES:
            raise InputError(
                f"MoE layer {index}: {name} is {parameter.dtype}; replicas and gradients need experts in bfloat16, "
                "float16, float32 or float64"
            )
    _check_lists(index, tensors, home)
    _check_memory(index, tensors, layers, home)


def check_compute_dtype(index: int, tensors: Sequence[ExpertTensor], compute_dtype: torch.dtype | None) -> None:
    """Raises InputError if experts can't be computed in a dtype, or have less precision than it."""
    widest = max((parameters_of(tensor)[0].dtype for tensor in tensors), key=lambda dtype: dtype.itemsize)
    if compute_dtype is None or (compute_dtype in DTYPES and compute_dtype.itemsize <= widest.itemsize):
        return
    raise InputError(
        f"MoE layer {index}: experts in {widest} can't be computed in {compute_dtype}; the compute dtype should be "
        f"{widest}, or one of bfloat16, float16 and float32 that has not more bits"
    )


def check_current_parameters(layer: HomeExperts) -> None:
    """Raises InputError if the parameters of a layer differ in shape or dtype from those that were added, have no
    memory, or are not those that the model has."""
    home, tensors = layer.home_experts, layer.tensors
    for t, (tensor, (shape, _)) in enumerate(zip(tensors, layer.likes, strict=True)):
        if len(tensor) != shape[0] and not isinstance(tensor, torch.Tensor):
            raise InputError(
                f"MoE layer {layer.index}: expert tensor {t} was added as a list of {shape[0]} tensors and has "
                f"{len(tensor)} now"
            )
    for t, (tensor, (shape, dtype)) in enumerate(zip(tensors, layer.likes, strict=True)):
        like = shape if isinstance(tensor, torch.Tensor) else shape[1:]
        for row, parameter in enumerate(parameters_of(tensor)):
            if _is_as_added(parameter, like, dtype):
                continue
            # Names are made for errors alone.
            name = _name_of(t, tensor, home[row])
            _check_is_parameter(layer.index, parameter, name)
            if (parameter.shape, parameter.dtype) != (like, dtype):
                raise InputError(
                    f"MoE layer {layer.index}: {name} was added as {list(like)} {dtype} and is "
                    f"{list(parameter.shape)} {parameter.dtype} now; convert the model before its experts are added to "
                    "the session"
                )
            raise InputError(
                f"MoE layer {layer.index}: {name} has no memory now; load or onload the experts before a micro-step"
            )
    if any(len({parameter.requires_grad for parameter in parameters_of(tensor)}) > 1 for tensor in tensors):
        _check_lists(layer.index, tensors, home)
    if not layer.joins_in_backward:
        check_owners(layer.index, layer.parameters)


def check_memory(layer: HomeExperts) -> None:
    """Raises InputError if a framework has offloaded a layer's experts, by the first Parameter of each tensor."""
    for tensor in layer.tensors:
        first = parameters_of(tensor)[0]
        if first.numel() and not first.untyped_storage().nbytes():
            raise InputError(
                f"MoE layer {layer.index}: experts have no memory now; load or onload the experts before a micro-step"
            )


def _is_as_added(parameter: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether it is a Parameter of this shape and dtype that has memory."""
    return (
        isinstance(parameter, torch.nn.Parameter)
        and parameter.shape == shape
        and parameter.dtype is dtype
        and not parameter.is_meta
        and (parameter.untyped_storage().nbytes() > 0 or not parameter.numel())
    )


def _check_is_parameter(index: int, parameter: object, name: str) -> None:
    if isinstance(parameter, torch.nn.Parameter):
        return
    cause = ""
    if isinstance(parameter, torch.Tensor):
        cause = (
            "; it is computed from Parameters, as LoRA by torch.nn.utils.parametrize is, and has no gradient of its "
            "own: merge it into a Parameter, or adapt other modules"
        )
    raise InputError(f"MoE layer {index}: {name} is of type {type(parameter).__name__}, not a Parameter{cause}")


def _named(tensors: Sequence[ExpertTensor], home: Array) -> Iterator[tuple[int, torch.nn.Parameter, str]]:
    """All Parameters, each with the number of its tensor and its name in errors."""
    for t, tensor in enumerate(tensors):
        for expert, parameter in zip(home, parameters_of(tensor), strict=not isinstance(tensor, torch.Tensor)):
            yield t, parameter, _name_of(t, tensor, expert)


def _name_of(t: int, tensor: ExpertTensor, expert: int) -> str:
    """The name of a tensor of the experts in errors, or of that of an expert."""
    return f"expert tensor {t}" if isinstance(tensor, torch.Tensor) else f"expert tensor {t} of expert {expert}"


def _check_lists(index: int, tensors: Sequence[ExpertTensor], home: Array) -> None:
    """Raises InputError if the Parameters of a list differ in shape, dtype or whether they are trained."""
    first: dict[int, _Form] = {}
    for t, parameter, name in _named(tensors, home):
        form = parameter.shape, parameter.dtype, parameter.requires_grad
        if form != first.setdefault(t, form):
            raise InputError(
                f"MoE layer {index}: {name} is {_form_text(form)}, and {_form_text(first[t])} of expert {home[0]}; the "
                "tensors of a list should be equal in these"
            )


def _form_text(form: _Form) -> str:
    shape, dtype, is_trained = form
    return f"{list(shape)} {dtype}, {'trained' if is_trained else 'frozen'}"


def _check_memory(index: int, tensors: Sequence[ExpertTensor], layers: Sequence[HomeExperts], home: Array) -> None:
    """Raises InputError if tensors of a new layer are in another layer, too, or overlap with others in memory."""
    spans = [(*_span(parameter), layer.index, "") for layer in layers for parameter in layer.parameters]
    spans += [(*_span(parameter), index, name) for _, parameter, name in _named(tensors, home)]
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
