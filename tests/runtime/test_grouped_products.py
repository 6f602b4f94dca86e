"""Products of grouped rows, and of their gradients, beside a plain loop in float64."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trimtab.runtime.program.grouped_products import ExpertWeight, RowGroups, grouped_bias, grouped_linear

GROUPS = RowGroups.on_host(np.array([3, 0, 5, 1]))


@pytest.mark.parametrize("frozen", ["nothing", "rows", "weights"])
@pytest.mark.parametrize(("as_list", "transposed"), [*product([False, True], repeat=2)])
def test_gradients_are_those_of_a_plain_loop(as_list: bool, transposed: bool, frozen: str) -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 4, generator=random, dtype=torch.float64, requires_grad=frozen != "rows")
    stack = torch.randn(4, 6, 4, generator=random, dtype=torch.float64)
    bias = torch.randn(4, 6, generator=random, dtype=torch.float64)
    weights = stack.mT.contiguous() if transposed else stack
    leaves = [*weights.unbind(), *bias.unbind()] if as_list else [weights, bias]
    leaves = [leaf.clone().requires_grad_(frozen != "weights") for leaf in leaves]
    half = len(leaves) // 2
    weight, biases = (ExpertWeight(part if as_list else part[0]) for part in (leaves[:half], leaves[half:]))
    result = grouped_bias(grouped_linear(rows, weight, GROUPS, transposed=transposed), biases, GROUPS)

    plain_rows = rows.detach().clone().requires_grad_(frozen != "rows")
    plain = [leaf.detach().clone().requires_grad_(frozen != "weights") for leaf in leaves]
    each = [list(part) if as_list else part[0].unbind() for part in (plain[:half], plain[half:])]
    parts = plain_rows.split(GROUPS.counts)
    expected = torch.cat([part @ (w if transposed else w.T) + b for part, w, b in zip(parts, *each, strict=True)])
    torch.testing.assert_close(result, expected)

    gradient = torch.randn(9, 6, generator=random, dtype=torch.float64)
    flops = []
    for value in (result, expected):
        with FlopCounterMode(display=False) as counter:
            value.backward(gradient)
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1]
    for mine, theirs in zip([rows, *leaves], [plain_rows, *plain], strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad)
