"""`run_in_two_phases`: home experts that stay, and whole experts on other ranks, whose rows leave their home again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trimtab.runtime.layer.instance import Instance
from trimtab.runtime.ranks import lockstep
from trimtab.runtime.rows.exchange import RowExchange
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
    # On their way while experts that stay are computed; in backward, their gradients.
    out = _Hop(instance, phase.send_splits, phase.recv_splits, lockstep.SECOND_DISPATCH)
    underway = _Start.apply(leaving, out)
    outputs = stay(kept)
    came = _Finish.apply(underway, out)
    back = _Hop(instance, phase.recv_splits, phase.send_splits, lockstep.SECOND_COMBINE)
    returned = _Finish.apply(_Start.apply(move(came), back), back)
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


class _Hop:
    """Rows from homes to the ranks of moved experts, or back; gradients go the opposite way.

    Args:
        kind: of the exchange, as an index into `lockstep.CALLS`.
    """

    def __init__(self, instance: Instance, send: list[int], receive: list[int], kind: int) -> None:
        self._instance, self._send, self._receive, self._kind = instance, send, receive, kind
        self._underway: RowExchange | None = None

    def start(self, rows: torch.Tensor) -> torch.Tensor:
        """What will arrive; it is not complete before `finish`."""
        self._underway = self._instance.exchange(self._kind, rows, self._send, self._receive, overlaps=True)
        return self._underway.arrived

    def start_backward(self, gradient: torch.Tensor) -> None:
        """Start to send gradients."""
        kind = self._kind + lockstep.SECOND_BACKWARD
        self._underway = self._instance.exchange(kind, gradient, self._receive, self._send, overlaps=True)

    def finish(self) -> torch.Tensor:
        """Wait for what was started, and return it."""
        assert self._underway is not None
        arrived, self._underway = self._underway.finish(), None
        return arrived


class _Start(torch.autograd.Function):
    """Starts a hop. Its backward waits for the gradients."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, hop: _Hop) -> torch.Tensor:
        ctx.hop = hop
        return hop.start(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        # What comes along the graph has only the shape of the gradient.
        return ctx.hop.finish(), None


class _Finish(torch.autograd.Function):
    """Waits for the rows of a hop. Its backward starts to send the gradients."""

    @staticmethod
    def forward(ctx: Any, underway: torch.Tensor, hop: _Hop) -> torch.Tensor:
        ctx.hop = hop
        hop.finish()
        return underway.view_as(underway)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.hop.start_backward(grads[0])
        return grads[0], None


def _joined(kept: torch.Tensor, left: torch.Tensor, phase: SecondPhase) -> torch.Tensor:
    joined = kept.new_empty(len(kept) + len(left), kept.shape[1])
    joined.index_put_((phase.kept_rows,), kept)
    joined.index_put_((phase.leaving_rows,), left)
    return joined
