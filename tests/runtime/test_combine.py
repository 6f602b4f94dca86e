"""The weighted sum of a token's experts, with weights of every dtype, compared with float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from trimtab.runtime import ExpertLayer, Session

TOKENS, HIDDEN, EXPERTS, TOP_K = 64, 40, 8, 4
DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture
def layer_of() -> Iterator[type[Layers]]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield Layers
    dist.destroy_process_group()


class Layers:
    """A layer whose experts return their rows, times one: what it adds is the combine alone."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.session = Session(num_experts=EXPERTS, slots_per_rank=0)
        ones = torch.nn.Parameter(torch.ones(EXPERTS, 1, dtype=dtype))
        self.layer: ExpertLayer = self.session.add_layer([ones], lambda weights, rows, groups: rows * 1)


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row_dtype", DTYPES, ids=str)
def test_a_weighted_sum_is_rounded_once(
    layer_of: type[Layers], row_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(row_dtype).requires_grad_()
    weights = torch.rand(TOKENS, TOP_K, generator=generator).to(weight_dtype).requires_grad_()
    gradient = torch.randn(TOKENS, HIDDEN, generator=generator).to(row_dtype)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    layers = layer_of(row_dtype)
    output = layers.layer(hidden, ids, weights)
    output.backward(gradient)
    layers.session.close()

    # Every expert returns its token, so that the sum is the token times the sum of its weights.
    rows, exact = hidden.detach().double(), weights.detach().double()
    check(output, rows * exact.sum(1, keepdim=True), 1.01)
    # Products are rounded before they are summed only if both factors have the dtype of the weights.
    assert weights.grad is not None
    check(weights.grad, (rows * gradient.double()).sum(1, keepdim=True).expand(-1, TOP_K), 2)
    # The gradient of each row is rounded before it is sent.
    assert hidden.grad is not None
    check(hidden.grad, gradient.double() * exact.sum(1, keepdim=True), 1.22)
    assert (output.dtype, hidden.grad.dtype, weights.grad.dtype) == (row_dtype, row_dtype, weight_dtype)


def check(found: torch.Tensor, exact: torch.Tensor, most: float) -> None:
    """The norm of the error is at most `most` times that of rounding, but for the order of sums in float32 and more."""
    rounded = (exact.to(found.dtype).double() - exact).norm()
    order = exact.norm() * 2 * torch.finfo(torch.float64 if found.dtype == torch.float64 else torch.float32).eps
    assert (found.detach().double() - exact).norm() <= most * rounded + order
