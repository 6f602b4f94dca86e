"""What benchmarks measure: seconds of MoE blocks, operations per second, and figures of the right rank and round."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import megatron, runtime, runtime_variants, transfer
from benchmarks.runtime_variants import time_blocks
from trimtab.cluster import ModelSpec


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


def test_operations_of_grouped_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 matrices of 8 x 4 weights, 2 operations a weight, 4 experts."""
    sizes: Any = SimpleNamespace(tokens_per_expert=(2, 6), dtype=torch.float32)
    clock: Any = SimpleNamespace(medians=lambda works, rounds: dict.fromkeys(works, 0.5))
    model = ModelSpec("m", num_experts=4, top_k=1, hidden_size=8, expert_width=4)
    found = transfer.measure_grouped(sizes, model, clock, torch.device("cpu"), 1)
    assert found["experts"] == 4
    assert [(point["tokens"], point["ms"]) for point in found["tokens_per_expert"]] == [(2, 500), (6, 500)]
    rates = [point["tflops"] for point in found["tokens_per_expert"]]
    assert rates == pytest.approx([4 * tokens * 2 * 3 * 8 * 4 / 0.5 / 1e12 for tokens in (2, 6)])


def test_transfers_are_medians_over_rounds() -> None:
    """Rounds of MoE seconds, exposed seconds, and the figures of each path."""
    rounds = [
        [10.0, 1.0, 0.1, 7.0, 100.0, 20.0, 5.0],
        [20.0, 4.0, 0.3, 9.0, 300.0, 40.0, 6.0],
        [40.0, 2.0, 0.2, 8.0, 200.0, 60.0, 7.0],
    ]
    found = runtime._summarise_transfers(rounds)
    low, high = found.pop("exposed_fraction_interval")
    # 10%, 20% and 5% of MoE time.
    assert found == {
        "moe_s": 20.0, "exposed_s": 2.0, "refresh_s": 0.2, "cpu_s": 8.0, "peer_bytes": 200.0, "host_bytes": 40.0,
        "gradient_bytes": 6.0, "exposed_fraction": 0.1,
    }  # fmt: skip
    assert (low, high) == (0.05, 0.2)


def test_seconds_of_each_rank_are_medians_over_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank takes ten times as long."""

    def gather(ranks_RV: list[torch.Tensor], mine: torch.Tensor) -> None:
        for rank, values in enumerate(ranks_RV):
            values.copy_(mine * 10**rank)

    monkeypatch.setattr(megatron, "dist", SimpleNamespace(get_world_size=lambda: 2, all_gather=gather))
    results = {"plain": [(9.0, 1.0), (9.0, 3.0), (9.0, 2.0)], "planned": [(9.0, 4.0)] * 2, "other": [(9.0, 8.0)]}
    assert megatron._median_cpu_s(results) == {"plain": [2, 20], "planned": [4, 40], "other": [8, 80]}
