"""The second hop is under way while experts compute, in forward and backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from trimtab.runtime.layer.dispatch import run_in_two_phases
from trimtab.runtime.ranks.lockstep import SECOND_BACKWARD, SECOND_COMBINE, SECOND_DISPATCH


class Told(torch.autograd.Function):
    """Notes that an expert is computed, or its gradient."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, notes: list[str], name: str) -> torch.Tensor:
        ctx.notes, ctx.name = notes, name
        notes.append(name)
        return 2 * rows

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.notes.append(f"{ctx.name}, backward")
        return 2 * grads[0], None, None


def test_rows_are_under_way_while_experts_that_stay_compute() -> None:
    notes: list[str] = []
    names = {SECOND_DISPATCH: "dispatch", SECOND_COMBINE: "combine"}
    names |= {kind + SECOND_BACKWARD: f"{name}, backward" for kind, name in names.items()}

    def exchange(
        kind: int, rows: torch.Tensor, _send: list[int], _receive: list[int], overlaps: bool
    ) -> SimpleNamespace:
        assert overlaps
        notes.append(f"start {names[kind]}")
        arrived = torch.full_like(rows, torch.nan)

        def finish() -> torch.Tensor:
            notes.append(f"finish {names[kind]}")
            return arrived.copy_(rows)

        return SimpleNamespace(arrived=arrived, finish=finish)

    instance: Any = SimpleNamespace(exchange=exchange)
    phase: Any = SimpleNamespace(
        kept_rows=torch.tensor([0, 2]), leaving_rows=torch.tensor([1]), send_splits=[1], recv_splits=[1]
    )
    rows = torch.randn(3, 2, requires_grad=True)
    outputs = run_in_two_phases(
        rows,
        instance,
        phase,
        lambda kept: Told.apply(kept, notes, "stay"),
        lambda came: Told.apply(came, notes, "move"),
    )
    assert torch.equal(outputs, 2 * rows)
    assert notes == [
        "start dispatch", "stay", "finish dispatch", "move", "start combine", "finish combine",
    ]  # fmt: skip
    notes.clear()
    outputs.sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad, torch.full_like(rows, 2))
    assert notes == [
        "start combine, backward", "finish combine, backward", "move, backward",
        "start dispatch, backward", "stay, backward", "finish dispatch, backward",
    ]  # fmt: skip
