"""`GroupedLinear`: the products of all experts in one operation, where Transformer Engine isn't installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class GroupedLinear(nn.Module):
    """A linear layer for each expert, for Megatron's `TEGroupedMLP`.

    As in Transformer Engine's class each expert has a Parameter, `weight0`.. `[output, input]`; gradients of weights
    are added to their `main_grad`, and autograd gets tensors of no meaning. There are no biases.
    """

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, init_method: Callable[..., Any],
        **_options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_gemms = num_gemms
        self.fuse_wgrad_accumulation = True
        for number in range(num_gemms):
            weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            init_method(weight)
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            setattr(self, f"weight{number}", weight)

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, None]:
        """The products `[N, output]` of rows `[N, input]`, `counts` of them for each expert; and no biases."""
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        product: torch.Tensor = _Product.apply(rows, counts, *weights)
        return product, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: Sequence[int], *weights: torch.Tensor) -> torch.Tensor:
        ends_E = torch.tensor(counts, dtype=torch.int32).cumsum_(0)
        stacked = torch.stack(weights)
        # `save_for_backward` does not keep attributes of tensors.
        ctx.weights = weights
        ctx.save_for_backward(rows, stacked, ends_E)
        return nn.functional.grouped_mm(rows, stacked.transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        rows, stacked, ends_E = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        gradient_of_rows = nn.functional.grouped_mm(gradient, stacked, offs=ends_E)
        of_weights = nn.functional.grouped_mm(gradient.transpose(0, 1), rows, offs=ends_E)
        torch._foreach_add_([weight.main_grad for weight in ctx.weights], of_weights.unbind())
        for weight in ctx.weights:
            weight.grad_added_to_main_grad = True
        without_meaning = torch.empty_like(stacked[0])
        return gradient_of_rows, None, *[without_meaning] * len(ctx.weights)
