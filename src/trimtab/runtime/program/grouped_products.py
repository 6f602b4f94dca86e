"""Expert compute: one matrix product per copy over its rows, for any number of rows.

Tests without a GPU cover torch's grouped product and the loop, but not the choice between them on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.autograd.torch_engine import SubstitutedValues, once_differentiable, running_backward
from trimtab.runtime.state.flat_memory import upload

# Major compute capabilities with a kernel of `grouped_mm`, as of torch 2.13: Hopper and data-centre Blackwell.
GROUPED_KERNEL_CAPABILITIES = (9, 10)


class ExpertWeight:
    """One tensor of G experts, as an expert function gets it; the argument of `grouped_linear` and `grouped_bias`.

    Args:
        values: in the graph: a stack `[G, ...]`, or a list of G tensors `[...]`, which is never stacked.
        again: returns the same values during backward, for a stack whose memory may be overwritten before that, such as
            a replica's slot.
    """

    def __init__(
        self, values: torch.Tensor | Sequence[torch.Tensor], again: Callable[[], torch.Tensor] | None = None
    ) -> None:
        self._values = values
        self.again = again

    @property
    def is_list(self) -> bool:
        """Whether the values are a list instead of a stack."""
        return not isinstance(self._values, torch.Tensor)

    @property
    def tensor(self) -> torch.Tensor:
        """`[G, ...]`, in the graph; with the same values when a checkpoint runs the function again in backward.

        Raises:
            InputError: for a list.
        """
        if not isinstance(self._values, torch.Tensor):
            raise InputError(
                "these experts are a list of tensors, and a stack of them would be a copy; use `tensors`, or "
                "grouped_linear() and grouped_bias()"
            )
        if self.again is None or running_backward() is None:
            return self._values
        values: torch.Tensor = SubstitutedValues.apply(self.again(), False, self._values)
        return values

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """G tensors `[...]`, in the graph: the list, or the rows of `tensor`."""
        return self.tensor.unbind() if isinstance(self._values, torch.Tensor) else self._values


ApplyExperts = Callable[[Sequence[ExpertWeight], torch.Tensor, "RowGroups"], torch.Tensor]
"""`apply(weights, rows, groups)`: rows `[N, H]` grouped by expert to outputs `[N, H]`. N and G may be 0."""


@dataclass(frozen=True, eq=False)
class RowGroups:
    """Groups of consecutive rows, one for each of G experts.

    Attributes:
        counts: number of rows of each group, on the host.
        ends: `[G]` int32 on the device, the end of each group.
    """

    counts: list[int]
    ends: torch.Tensor

    @classmethod
    def on_host(cls, counts_G: Array) -> RowGroups:
        """Groups of the given sizes `[G]`, with `ends` on the host."""
        return cls(counts_G.tolist(), torch.from_numpy(np.cumsum(counts_G, dtype=np.int32)))

    @classmethod
    def of(cls, counts: list[int], device: torch.device) -> RowGroups:
        """Groups of the given sizes; the host does not wait for the device."""
        (ends,) = upload([np.cumsum(counts, dtype=np.int32)], device)
        return cls(counts, ends)


def gated_experts(activation: Callable[[torch.Tensor], torch.Tensor] = F.silu) -> ApplyExperts:
    """Experts with a gate, as in Qwen3-MoE and Mixtral: `down(activation(gate(x)) * up(x))`.

    The returned function takes `gate_up [G, 2 * I, H]` and `down [G, H, I]`, stacks or lists.
    """

    def apply(weights: Sequence[ExpertWeight], rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        gate_up, down = weights
        gate, up = grouped_linear(rows, gate_up, groups).chunk(2, dim=-1)
        return grouped_linear(activation(gate) * up, down, groups)

    return apply


def grouped_linear(
    rows: torch.Tensor, weight: ExpertWeight, groups: RowGroups, *, transposed: bool = False
) -> torch.Tensor:
    """`rows [N, in]` times the `weight [G, out, in]` of each group, `[N, out]`. Differentiable.

    Args:
        transposed: the weights are `[G, in, out]`.
    """
    weights = weight.tensors if weight.is_list else [weight.tensor]
    result: torch.Tensor = _GroupedLinear.apply(rows, weight.is_list, weight.again, groups, transposed, *weights)
    return result


def grouped_bias(rows: torch.Tensor, bias: ExpertWeight, groups: RowGroups) -> torch.Tensor:
    """`rows [N, out]` plus the `bias [G, out]` of each group. Differentiable."""
    if bias.is_list:
        return rows + torch.cat([b.expand(count, -1) for b, count in zip(bias.tensors, groups.counts, strict=True)])
    repeats = groups.ends.diff(prepend=groups.ends.new_zeros(1))
    return rows + bias.tensor.repeat_interleave(repeats, dim=0, output_size=len(rows))


class _GroupedLinear(torch.autograd.Function):
    """`grouped_linear`. Each weight of a list gets its own gradient, zeros if it has no rows."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        is_list: bool,
        again: Callable[[], torch.Tensor] | None,
        groups: RowGroups,
        transposed: bool,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        # Saved, since the memory of the ends has all tables of some layers, and a graph may outlive its backward.
        ctx.save_for_backward(rows, groups.ends, *(weights if again is None else []))
        ctx.is_list, ctx.again, ctx.counts, ctx.transposed = is_list, again, groups.counts, transposed
        return _rows_by_weight(rows, _oriented(weights if is_list else weights[0], not transposed), groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grads[0].contiguous()
        rows, ends, *kept = ctx.saved_tensors
        groups = RowGroups(ctx.counts, ends)
        grad_rows = None
        grad_weights: Sequence[torch.Tensor | None] = [None] * (len(ctx.needs_input_grad) - 5)
        if ctx.needs_input_grad[0]:
            values = kept if ctx.is_list else kept[0] if ctx.again is None else ctx.again()
            grad_rows = _rows_by_weight(grad, _oriented(values, ctx.transposed), groups)
        if any(ctx.needs_input_grad[5:]):
            outer, inner = (rows, grad) if ctx.transposed else (grad, rows)
            grad_weights = _weight_gradients(outer, inner, groups, is_list=ctx.is_list)
        return grad_rows, None, None, None, None, *grad_weights


def _oriented(weight: torch.Tensor | Sequence[torch.Tensor], transposed: bool) -> torch.Tensor | Sequence[torch.Tensor]:
    """The weights or their transposes."""
    if not transposed:
        return weight
    return weight.transpose(-2, -1) if isinstance(weight, torch.Tensor) else [one.t() for one in weight]


def _rows_by_weight(
    rows: torch.Tensor, weight: torch.Tensor | Sequence[torch.Tensor], groups: RowGroups
) -> torch.Tensor:
    """`rows [N, a]` times `weight [G, a, b]` group by group."""
    if isinstance(weight, torch.Tensor) and len(rows) and _has_grouped_kernel(rows, weight):
        return F.grouped_mm(rows, weight, offs=groups.ends)
    width = weight.shape[-1] if isinstance(weight, torch.Tensor) else weight[0].shape[-1]
    out = rows.new_empty(len(rows), width)
    for index, (part, out_part) in enumerate(zip(rows.split(groups.counts), out.split(groups.counts), strict=True)):
        torch.mm(part, weight[index], out=out_part)
    return out


def _weight_gradients(
    outer: torch.Tensor, inner: torch.Tensor, groups: RowGroups, *, is_list: bool
) -> Sequence[torch.Tensor]:
    """`outer [N, a]` and `inner [N, b]` to G tensors `[a, b]` in memory of their own, or to one `[G, a, b]`."""
    if not is_list and len(outer) and _has_grouped_kernel(outer, inner):
        gradient = F.grouped_mm(outer.t(), inner, offs=groups.ends)
        if gradient.is_cuda:
            # Some kernels do not write the products of groups without rows.
            for index, count in enumerate(groups.counts):
                if count == 0:
                    gradient[index].zero_()
        return [gradient]
    shape = outer.shape[1], inner.shape[1]
    stack = [] if is_list else [outer.new_empty(len(groups.counts), *shape)]
    targets = [outer.new_empty(shape) for _ in groups.counts] if is_list else stack[0].unbind()
    for target, left, right in zip(targets, outer.split(groups.counts), inner.split(groups.counts), strict=True):
        torch.mm(left.t(), right, out=target)
    return stack or targets


def _has_grouped_kernel(*operands: torch.Tensor) -> bool:
    """Whether `grouped_mm` supports the operands: not float64, and rows that are multiples of 16 bytes.

    On CUDA it has a kernel for bfloat16 on some GPUs. Elsewhere it would wait for the device to read the counts, which
    are known on the host.
    """
    if operands[0].is_cuda and (
        operands[0].dtype is not torch.bfloat16
        or torch.cuda.get_device_capability(operands[0].device)[0] not in GROUPED_KERNEL_CAPABILITIES
    ):
        return False
    return all(
        operand.dtype is not torch.float64
        and all(size * operand.element_size() % 16 == 0 for size in operand.shape[1:])
        for operand in operands
    )
