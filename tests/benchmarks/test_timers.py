"""What benchmarks measure: seconds of MoE blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import runtime_variants
from benchmarks.runtime_variants import time_blocks


class Work(torch.autograd.Function):
    """Takes 1 s forward and 2 s backward on a given clock."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, clock: list[float]) -> torch.Tensor:
        ctx.clock = clock
        clock[0] += 1
        return hidden * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock[0] += 2
        return gradients[0] * 2, None


class Block(nn.Module):
    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = Work.apply(hidden, self.clock)
        return output


def test_forward_and_backward_of_blocks_are_timed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(runtime_variants, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    blocks = [Block(clock), Block(clock)]
    hidden = torch.ones(2, requires_grad=True)
    with time_blocks(blocks) as timer:  # type: ignore[arg-type]
        middle = blocks[0](hidden)
        clock[0] += 100
        output = blocks[1](middle)
        clock[0] += 100
        output.sum().backward()
    assert timer.seconds == 2 * (1 + 2)
    blocks[0](hidden)
    assert timer.seconds == 6
