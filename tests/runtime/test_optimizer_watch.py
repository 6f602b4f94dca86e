"""Hooks of optimizer steps while sessions are created and collected."""

from __future__ import annotations

import gc

import torch

from trimtab.runtime.state.optimizer_watch import OptimizerWatch


def test_a_session_may_be_collected_in_the_middle_of_an_optimizer_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    seen: list[str] = []

    def collect(holds_experts: bool) -> None:
        gc.collect()
        seen.append(f"with experts: {holds_experts}")

    watch = OptimizerWatch(lambda: [parameter], collect, collect)
    for _ in range(3):
        other = OptimizerWatch(list, lambda _: None, lambda _: None)
        # A reference cycle, as in sessions.
        other.registered.append(other)  # type: ignore[arg-type]
        del other
        torch.optim.SGD([parameter], lr=0.1).step()
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert seen == ["with experts: True"] * 6 + ["with experts: False"] * 2
    del watch
