"""`Dispatcher`: the protocol for sending rows to their physical experts and back; `RowDispatcher`: the default.

Any dispatcher that routes tokens by expert id can be used, configured for R x (H + S) experts; see
`physical_experts.py`. The default exchanges no sizes before the rows, since they follow from the plan.

`run_in_two_phases`: home experts that stay, and whole experts on other ranks, whose rows leave their home again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from trimtab.runtime.autograd.torch_engine import once_differentiable
from trimtab.runtime.layer.layer_call import LayerCall
from trimtab.runtime.program.device_kernels import combine_gradients, is_finer
from trimtab.runtime.program.exchange import RowExchange
from trimtab.runtime.program.grouped_products import RowGroups
from trimtab.runtime.program.program import SecondPhase
from trimtab.runtime.ranks import lockstep
from trimtab.runtime.ranks.recorder import BACKWARD, COMBINE, DISPATCH, EXPERTS

OfRows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Dispatched:
    """The rows of one instance that a rank has received.

    Attributes:
        home_rows: `[A, H]` rows for this rank's home experts, in the order of `home_groups`.
        replica_rows: `[B, H]` rows for its replicas, in the order of `replica_groups`.
        home_groups, replica_groups: number of rows of each home expert and of each replica slot in use.
        state: data of the dispatcher for `combine`.
    """

    home_rows: torch.Tensor
    replica_rows: torch.Tensor
    home_groups: RowGroups
    replica_groups: RowGroups
    state: Any


class Dispatcher(Protocol):
    """Sends rows to experts and their outputs back, both in the graph. Its methods are collective."""

    def dispatch(
        self, hidden: torch.Tensor, physical_ids: torch.Tensor, weights: torch.Tensor, call: LayerCall
    ) -> Dispatched:
        """Send each token to its physical experts.

        Args:
            hidden: `[n, H]`.
            physical_ids: `[n, K]` uint16, 0 .. R * (H + S) - 1.
            weights: `[n, K]`, the router's weights.
            call: the call; its `layout` has the numbers of rows.
        """
        ...

    def combine(self, outputs: Sequence[torch.Tensor], dispatched: Dispatched) -> torch.Tensor:
        """Send outputs back and sum them.

        Args:
            outputs: outputs of `home_rows`, and of `replica_rows` if any rank has a replica in this call.

        Returns:
            `[n, H]`, the weighted sum of each token's experts.
        """
        ...


class RowDispatcher:
    """Exchanges rows between ranks, with sizes from the layout."""

    def dispatch(
        self, hidden: torch.Tensor, physical_ids: torch.Tensor, weights: torch.Tensor, call: LayerCall
    ) -> Dispatched:
        """See `Dispatcher`."""
        layout = call.layout
        home_rows, replica_rows = _Dispatch.apply(hidden, call)
        return Dispatched(home_rows, replica_rows, layout.home_groups, layout.replica_groups, (call, weights))

    def combine(self, outputs: Sequence[torch.Tensor], dispatched: Dispatched) -> torch.Tensor:
        """See `Dispatcher`."""
        call, weights = dispatched.state
        combined: torch.Tensor = _Combine.apply(weights, call, *outputs)
        return combined


class _Dispatch(torch.autograd.Function):
    """Sends tokens to the ranks of their experts. Returns rows for home experts and rows for replicas."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, call: LayerCall) -> tuple[torch.Tensor, torch.Tensor]:
        call.mark(DISPATCH)
        places = call.layout.places
        assert places is not None
        ctx.call, ctx.num_arrived = call, sum(call.layout.recv_splits)
        # Saved, so that autograd frees them after the backward.
        ctx.save_for_backward(places.row_places, places.home_rows, places.replica_rows)
        kind = lockstep.DISPATCH if call.has_graph else lockstep.DISPATCH_WITHOUT_GRADIENTS
        arrived = call.send(kind, hidden.index_select(0, places.row_tokens), back=False)
        rows = arrived.index_select(0, places.home_rows), arrived.index_select(0, places.replica_rows)
        call.mark(EXPERTS)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        call: LayerCall = ctx.call
        call.mark(DISPATCH + BACKWARD)
        row_places, home_rows, replica_rows = ctx.saved_tensors
        arrived = grads[0].new_empty(ctx.num_arrived, grads[0].shape[1])
        arrived.index_put_((home_rows,), grads[0])
        arrived.index_put_((replica_rows,), grads[1])
        sent = call.send(lockstep.DISPATCH_BACKWARD, arrived, back=True)
        return F.embedding_bag(row_places, sent, mode="sum"), None


class _Combine(torch.autograd.Function):
    """Sends expert outputs back to the ranks of their tokens, and sums them with the router's weights."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, call: LayerCall, *outputs: torch.Tensor) -> torch.Tensor:
        call.mark(COMBINE)
        places = call.layout.places
        assert places is not None
        arrived = outputs[0].new_empty(sum(call.layout.recv_splits), outputs[0].shape[1])
        parts = (places.home_rows, places.replica_rows)[: len(outputs)]
        for rows, part in zip(parts, outputs, strict=True):
            arrived.index_put_((rows,), part)
        returned = call.send(lockstep.COMBINE, arrived, back=True)
        ctx.call = call
        ctx.save_for_backward(weights, returned, places.row_tokens, places.row_places, *parts)
        return _weighted_sums(returned, places.row_places, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        weights, returned, row_tokens, row_places, *parts = ctx.saved_tensors
        grad_rows, grad_weights = combine_gradients(grads[0], returned, weights, row_tokens, row_places)
        arrived = ctx.call.send(lockstep.COMBINE_BACKWARD, grad_rows, back=False)
        grad_parts = [arrived.index_select(0, rows) for rows in parts]
        ctx.call.mark(EXPERTS + BACKWARD)
        return grad_weights, None, *grad_parts


def _weighted_sums(rows: torch.Tensor, places_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
    """For each token the weighted sum `[n, H]` of rows `[N, H]` at its places, rounded once to their dtype."""
    high_NK = weights_NK.to(rows.dtype)
    if is_finer(weights_NK, rows):
        # The sum takes weights in the dtype of the rows only, so that a weight is the sum of two.
        low_NK = (weights_NK - high_NK).to(rows.dtype)
        places_NK, high_NK = torch.cat([places_NK, places_NK], dim=1), torch.cat([high_NK, low_NK], dim=1)
    return F.embedding_bag(places_NK, rows, per_sample_weights=high_NK, mode="sum")


def run_in_two_phases(
    rows: torch.Tensor, call: LayerCall, phase: SecondPhase, stay: OfRows, move: OfRows
) -> torch.Tensor:
    """Outputs `[A, H]` of rows that have reached the homes of their experts. Collective.

    Args:
        rows: `[A, H]`, by home expert.
        stay: outputs of rows of home experts, grouped by `phase.kept_groups`. It runs first, while weights are copied.
        move: outputs of rows that have come to this rank, grouped by `phase.came_groups`.
    """
    kept, leaving = _Part.apply(rows, phase)
    # On their way while experts that stay are computed; in backward, their gradients.
    out = _Hop(call, phase.send_splits, phase.recv_splits, lockstep.SECOND_DISPATCH)
    underway = _Start.apply(leaving, out)
    outputs = stay(kept)
    came = _Finish.apply(underway, out)
    back = _Hop(call, phase.recv_splits, phase.send_splits, lockstep.SECOND_COMBINE)
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

    def __init__(self, call: LayerCall, send: list[int], receive: list[int], kind: int) -> None:
        self._call, self._send, self._receive, self._kind = call, send, receive, kind
        self._underway: RowExchange | None = None

    def start(self, rows: torch.Tensor) -> torch.Tensor:
        """What will arrive; it is not complete before `finish`."""
        self._underway = self._call.exchange(self._kind, rows, self._send, self._receive, overlaps=True)
        return self._underway.arrived

    def start_backward(self, gradient: torch.Tensor) -> None:
        """Start to send gradients."""
        kind = self._kind + lockstep.SECOND_BACKWARD
        self._underway = self._call.exchange(kind, gradient, self._receive, self._send, overlaps=True)

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
