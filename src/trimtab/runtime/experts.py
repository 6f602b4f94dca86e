"""Expert compute: one matrix product per copy over the rows that belong to it, for any number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

ApplyExperts = Callable[[Sequence[torch.Tensor], torch.Tensor, "RowGroups"], torch.Tensor]
"""`apply(weights, rows, groups)`: rows `[N, H]` grouped by expert, weights stacked `[G, ...]`, to outputs `[N, H]`."""


@dataclass(frozen=True, eq=False)
class RowGroups:
    """How consecutive rows belong to G experts.

    Attributes:
        counts: rows of each group, on the host.
        ends: `[G]` int32 on the device, where each group ends.
    """

    counts: list[int]
    ends: torch.Tensor

    @classmethod
    def of(cls, counts: list[int], device: torch.device) -> RowGroups:
        ends = torch.from_numpy(np.cumsum(counts, dtype=np.int32))
        return cls(counts, ends.to(device, non_blocking=True))


def gated_experts(activation: Callable[[torch.Tensor], torch.Tensor] = F.silu) -> ApplyExperts:
    """Experts with a gate, as in Qwen3-MoE and Mixtral: `down(activation(gate(x)) * up(x))`.

    The returned function takes the stacked tensors `gate_up [G, 2 * I, H]` and `down [G, H, I]`.
    """

    def apply(weights: Sequence[torch.Tensor], rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        gate_up, down = weights
        gate, up = grouped_linear(rows, gate_up, groups).chunk(2, dim=-1)
        return grouped_linear(activation(gate) * up, down, groups)

    return apply


def grouped_linear(rows: torch.Tensor, weight: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """`rows [N, in]` times each group's own `weight [G, out, in]`, to `[N, out]`. Differentiable."""
    result: torch.Tensor = _GroupedLinear.apply(rows, weight, groups)
    return result


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.groups = groups
        return _rows_by_weight(rows, weight.transpose(-2, -1), groups)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (grad,) = grads
        rows, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = _rows_by_weight(grad, weight, ctx.groups) if ctx.needs_input_grad[0] else None
        grad_weight = _weight_gradient(grad, rows, ctx.groups) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_weight, None


def _rows_by_weight(rows: torch.Tensor, weight: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """`rows [N, a]` times `weight [G, a, b]` group by group."""
    if len(rows) == 0:
        return rows.new_empty(0, weight.shape[-1])
    if _has_grouped_kernel(rows, weight):
        return F.grouped_mm(rows, weight, offs=groups.ends)
    out = rows.new_empty(len(rows), weight.shape[-1])
    for index, (part, out_part) in enumerate(zip(rows.split(groups.counts), out.split(groups.counts), strict=True)):
        torch.mm(part, weight[index], out=out_part)
    return out


def _weight_gradient(grad: torch.Tensor, rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """`grad [N, out]` and `rows [N, in]` to `[G, out, in]`."""
    if len(rows) == 0:
        return rows.new_zeros(len(groups.counts), grad.shape[-1], rows.shape[-1])
    if _has_grouped_kernel(rows, grad):
        return F.grouped_mm(grad.t(), rows, offs=groups.ends)
    out = rows.new_empty(len(groups.counts), grad.shape[-1], rows.shape[-1])
    for index, (grad_part, part) in enumerate(zip(grad.split(groups.counts), rows.split(groups.counts), strict=True)):
        torch.mm(grad_part.t(), part, out=out[index])
    return out


def _has_grouped_kernel(*operands: torch.Tensor) -> bool:
    """`grouped_mm` takes neither float64 nor rows that are not whole multiples of 16 bytes."""
    return all(
        operand.dtype is not torch.float64
        and all(size * operand.element_size() % 16 == 0 for size in operand.shape[1:])
        for operand in operands
    )
