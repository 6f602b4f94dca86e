"""`run_in_two_phases`: home experts that stay, and whole experts on other ranks, whose rows leave their home again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trimtab.runtime.layer.instance import Instance
from trimtab.runtime.ranks import lockstep
from trimtab.runtime.rows.second_phase import SecondPhase

OfRows = Callable[[torch.Tensor], torch.Tensor]


def run_in_two_phases(
    rows: torch.Tensor, instance: Instance, phase: SecondPhase, stay: OfRows, move: OfRows
) -> torch.Tensor:
    """Outputs `[A, H]` of rows that have reached the homes of their experts. Collective.

    Args:
        rows: `[A, H]`, by home expert.
        stay: outputs of rows of home experts, grouped by `phase.kept_groups`. It runs first, while weights are copied.
        move: outputs of rows that have come to this rank, grouped by `phase.came_groups`.
    """
    kept, leaving = _Part.apply(rows, phase)
    outputs = stay(kept)
    came = _Hop.apply(leaving, instance, phase.send_splits, phase.recv_splits, lockstep.SECOND_DISPATCH)
    returned = _Hop.apply(move(came), instance, phase.recv_splits, phase.send_splits, lockstep.SECOND_COMBINE)
    joined: torch.Tensor = _Join.apply(outputs, returned, phase)
    return joined


class _Part(torch.autograd.Function):
    """Rows that stay, and rows that leave."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, phase: SecondPhase) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.phase = phase
        return rows.index_select(0, phase.kept_rows), rows.index_select(0, phase.leaving_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        kept, leaving = grads
        return _joined(kept, leaving, ctx.phase), None


class _Join(torch.autograd.Function):
    """The outputs of both, in the order of the rows."""

    @staticmethod
    def forward(ctx: Any, kept: torch.Tensor, returned: torch.Tensor, phase: SecondPhase) -> torch.Tensor:
        ctx.phase = phase
        return _joined(kept, returned, phase)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        phase: SecondPhase = ctx.phase
        return grads[0].index_select(0, phase.kept_rows), grads[0].index_select(0, phase.leaving_rows), None


class _Hop(torch.autograd.Function):
    """Sends rows from homes to the ranks of moved experts, or back; gradients go the opposite way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, instance: Instance, send: list[int], receive: list[int], kind: int
    ) -> torch.Tensor:
        ctx.instance, ctx.splits, ctx.kind = instance, (send, receive), kind
        return instance.exchange(kind, rows, send, receive)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        send, receive = ctx.splits
        arrived = ctx.instance.exchange(ctx.kind + lockstep.SECOND_BACKWARD, grads[0], receive, send)
        return arrived, None, None, None, None


def _joined(kept: torch.Tensor, left: torch.Tensor, phase: SecondPhase) -> torch.Tensor:
    joined = kept.new_empty(len(kept) + len(left), kept.shape[1])
    joined.index_put_((phase.kept_rows,), kept)
    joined.index_put_((phase.leaving_rows,), left)
    return joined
