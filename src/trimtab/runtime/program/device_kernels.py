"""Arithmetic on rows, gradients and ids in plain torch, or in one pass by `triton_kernels` on GPUs that have them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch

from trimtab.runtime.program.grouped_products import GROUPED_KERNEL_CAPABILITIES


@cache
def kernels_on(device: torch.device) -> ModuleType | None:
    """`triton_kernels`, if they are right on a device, which is tried once; None for plain torch."""
    try:
        kernels = load_kernels(device)
        if kernels is not None:
            check_kernels(kernels, device)
    except Exception as error:
        logging.getLogger("trimtab").warning("plain torch takes the place of Triton's kernels: %r", error)
        return None
    return kernels


def load_kernels(device: torch.device) -> ModuleType | None:
    """`triton_kernels` on GPUs for which tests compile them; None elsewhere. Raises without Triton or a C compiler."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in GROUPED_KERNEL_CAPABILITIES:
        return None
    import triton

    from trimtab.runtime.program import triton_kernels

    # Compiles C source of Triton, for which there may be no compiler.
    _ = triton.runtime.driver.active
    return triton_kernels


def check_kernels(kernels: Any, device: torch.device) -> None:
    """Raises RuntimeError if kernels differ from plain torch on small whole numbers, whose sums are exact."""
    tokens, top_k, width = 5, 3, 40
    values = torch.arange(tokens * top_k * width, device=device).remainder(7).float()
    rows, grad = values.view(-1, width), values[: tokens * width].view(tokens, width)
    ids = torch.arange(tokens * top_k, device=device).remainder(4).view(tokens, top_k)
    places = torch.arange(tokens * top_k, dtype=torch.int32, device=device).flip(0)
    operands = grad.bfloat16(), rows.bfloat16(), (ids + 1).float()
    found: list[torch.Tensor] = [*kernels.combine_gradients(*operands, places.view(ids.shape))]
    plain: list[torch.Tensor] = [*_combine_gradients(*operands, places // top_k, places.view(ids.shape))]
    for tensors, add in ((found, kernels.add_arrivals), (plain, _add_arrivals)):
        targets = [grad.clone(), rows.clone()]
        add(targets, [[rows[:tokens].clone(), grad.clone()], [rows.clone()]])
        tensors += targets
    found += kernels.multi_hot(ids, operands[2], top_k + 1)
    plain += _multi_hot(ids, operands[2], top_k + 1)
    if not all(map(torch.equal, found, plain)):
        raise RuntimeError("their results differ from those of plain torch on this GPU; please report it")


def combine_gradients(
    grad: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, row_tokens: torch.Tensor, row_places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients `[N, H]` of rows and `[n, K]` of weights, of the weighted sum of each token's rows.

    Args:
        grad: `[n, H]`, of the sums.
        rows: `[N, H]`, N = n * K.
        weights: `[n, K]`.
        row_tokens, row_places: see `RowPlaces`.
    """
    kernels = kernels_on(rows.device)
    if kernels is not None and torch.float64 not in (rows.dtype, weights.dtype):
        gradients: tuple[torch.Tensor, torch.Tensor] = kernels.combine_gradients(grad, rows, weights, row_places)
        return gradients
    return _combine_gradients(grad, rows, weights, row_tokens, row_places)


def _combine_gradients(
    grad: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, row_tokens: torch.Tensor, row_places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_rows = grad.index_select(0, row_tokens)
    places = row_places.view(-1)
    precise = weights.dtype if is_finer(weights, rows) else rows.dtype
    products = (grad_rows.to(precise) * rows).sum(dim=-1)
    grad_weights = products.index_select(0, places).view_as(weights).to(weights.dtype)
    row_weights = weights.new_empty(weights.numel())
    row_weights.index_put_((places,), weights.reshape(-1))
    # Computed in the more precise dtype of the two.
    grad_rows.mul_(row_weights[:, None])
    return grad_rows, grad_weights


def is_finer(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor's dtype is more precise than that of another."""
    return torch.finfo(one.dtype).eps < torch.finfo(other.dtype).eps


def add_arrivals(targets: Sequence[torch.Tensor], arrivals: Sequence[Sequence[torch.Tensor]]) -> None:
    """Add to each target the sum of its arrivals, which are summed in their order; their memory may be overwritten.

    Args:
        targets: tensors without common memory.
        arrivals: for each target at least one tensor of its shape.
    """
    kernels = kernels_on(targets[0].device) if _has_kernel(targets, arrivals) else None
    if kernels is not None:
        kernels.add_arrivals(targets, arrivals)
    else:
        _add_arrivals(targets, arrivals)


def _add_arrivals(targets: Sequence[torch.Tensor], arrivals: Sequence[Sequence[torch.Tensor]]) -> None:
    for target, of_target in zip(targets, arrivals, strict=True):
        target += ordered_sum(of_target)


def ordered_sum(arrivals: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of tensors in their order, in the memory of the first."""
    first, *others = arrivals
    for other in others:
        first += other
    return first


def _has_kernel(targets: Sequence[torch.Tensor], arrivals: Sequence[Sequence[torch.Tensor]]) -> bool:
    added = [arrival for of_target in arrivals for arrival in of_target]
    dtypes = {target.dtype for target in targets}
    # Single arrivals are added in one pass anyway.
    return (
        len(added) > len(targets)
        and len(dtypes) == 1
        and torch.float64 not in dtypes
        and all(arrival.dtype is torch.float32 for arrival in added)
        and all(tensor.is_contiguous() for tensor in (*targets, *added))
    )


def multi_hot(ids: torch.Tensor, weights: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of `count` experts each token has, `[n, count]` bool, and its weights there, `[n, count]`, 0 elsewhere.

    Args:
        ids: `[n, K]`, without repeated ones in a row.
        weights: `[n, K]`, in the graph.
    """
    if kernels_on(weights.device) is None:
        return _multi_hot(ids, weights, count)
    found: tuple[torch.Tensor, torch.Tensor] = _MultiHot.apply(ids, weights, count)
    return found


def _multi_hot(ids: torch.Tensor, weights: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    places, shape = ids.to(torch.int64), (ids.shape[0], count)
    routing_map = torch.zeros(shape, dtype=torch.bool, device=ids.device).scatter_(1, places, value=True)
    return routing_map, weights.new_zeros(shape).scatter(1, places, weights)


class _MultiHot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weights: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        kernels = kernels_on(weights.device)
        assert kernels is not None
        ctx.save_for_backward(ids)
        routing_map, probs = kernels.multi_hot(ids, weights, count)
        ctx.mark_non_differentiable(routing_map)
        return routing_map, probs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        (ids,) = ctx.saved_tensors
        return None, grads[1].gather(1, ids.to(torch.int64)), None
