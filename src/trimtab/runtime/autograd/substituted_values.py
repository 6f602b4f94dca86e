"""`SubstitutedValues`: values from other memory in the graph in place of tensors, which get the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


class SubstitutedValues(torch.autograd.Function):
    """`values` in the graph in place of `tensors` with equal values, perhaps of another dtype.

    The tensors are one of the shape of `values`, or with `is_list` one for each row of `values`.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, is_list: bool, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.is_list, ctx.dtype = is_list, tensors[0].dtype
        return values.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = grads[0].unbind() if ctx.is_list else [grads[0]]
        return None, None, *(part.to(ctx.dtype) for part in parts)
