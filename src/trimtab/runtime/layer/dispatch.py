"""`Dispatcher`: the protocol for sending rows to their physical experts and back; `RowDispatcher`: the default.

Any dispatcher that routes tokens by expert id can be used, configured for R x (H + S) experts; see
`physical_experts.py`. The default exchanges no sizes before the rows, since they follow from the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from trimtab.runtime.layer.instance import Instance
from trimtab.runtime.ranks import lockstep
from trimtab.runtime.ranks.recorder import BACKWARD, COMBINE, DISPATCH, EXPERTS
from trimtab.runtime.rows.expert_compute import RowGroups


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
        self, hidden: torch.Tensor, physical_ids: torch.Tensor, weights: torch.Tensor, instance: Instance
    ) -> Dispatched:
        """Send each token to its physical experts.

        Args:
            hidden: `[n, H]`.
            physical_ids: `[n, K]` uint16, 0 .. R * (H + S) - 1.
            weights: `[n, K]`, the router's weights.
            instance: the call; its `layout` has the numbers of rows.
        """
        ...

    def combine(self, outputs: Sequence[torch.Tensor], dispatched: Dispatched) -> torch.Tensor:
        """Send outputs back and sum them.

        Args:
            outputs: outputs of `home_rows`, and of `replica_rows` if any rank has a replica in this instance.

        Returns:
            `[n, H]`, the weighted sum of each token's experts.
        """
        ...


class RowDispatcher:
    """Exchanges rows between ranks, with sizes from the layout."""

    def dispatch(
        self, hidden: torch.Tensor, physical_ids: torch.Tensor, weights: torch.Tensor, instance: Instance
    ) -> Dispatched:
        """See `Dispatcher`."""
        layout = instance.layout
        home_rows, replica_rows = _Dispatch.apply(hidden, instance)
        return Dispatched(home_rows, replica_rows, layout.home_groups, layout.replica_groups, (instance, weights))

    def combine(self, outputs: Sequence[torch.Tensor], dispatched: Dispatched) -> torch.Tensor:
        """See `Dispatcher`."""
        instance, weights = dispatched.state
        combined: torch.Tensor = _Combine.apply(weights, instance, *outputs)
        return combined


class _Dispatch(torch.autograd.Function):
    """Sends tokens to the ranks of their experts. Returns rows for home experts and rows for replicas."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, instance: Instance) -> tuple[torch.Tensor, torch.Tensor]:
        instance.mark(DISPATCH)
        layout = instance.layout
        ctx.instance, ctx.num_arrived = instance, sum(layout.recv_splits)
        # Saved, so that autograd frees them after the backward.
        ctx.save_for_backward(layout.row_places, layout.home_rows, layout.replica_rows)
        kind = lockstep.DISPATCH if instance.has_graph else lockstep.DISPATCH_WITHOUT_GRADIENTS
        arrived = instance.send(kind, hidden.index_select(0, layout.row_tokens), back=False)
        rows = arrived.index_select(0, layout.home_rows), arrived.index_select(0, layout.replica_rows)
        instance.mark(EXPERTS)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        instance: Instance = ctx.instance
        instance.mark(DISPATCH + BACKWARD)
        row_places, home_rows, replica_rows = ctx.saved_tensors
        arrived = grads[0].new_empty(ctx.num_arrived, grads[0].shape[1])
        arrived.index_put_((home_rows,), grads[0])
        arrived.index_put_((replica_rows,), grads[1])
        sent = instance.send(lockstep.DISPATCH_BACKWARD, arrived, back=True)
        return F.embedding_bag(row_places, sent, mode="sum"), None


class _Combine(torch.autograd.Function):
    """Sends expert outputs back to the ranks of their tokens, and sums them with the router's weights."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, instance: Instance, *outputs: torch.Tensor) -> torch.Tensor:
        instance.mark(COMBINE)
        layout = instance.layout
        arrived = outputs[0].new_empty(sum(layout.recv_splits), outputs[0].shape[1])
        parts = (layout.home_rows, layout.replica_rows)[: len(outputs)]
        for rows, part in zip(parts, outputs, strict=True):
            arrived.index_put_((rows,), part)
        returned = instance.send(lockstep.COMBINE, arrived, back=True)
        ctx.instance = instance
        ctx.save_for_backward(weights, returned, layout.row_tokens, layout.row_places, *parts)
        row_weights = weights.to(returned.dtype)
        return F.embedding_bag(layout.row_places, returned, per_sample_weights=row_weights, mode="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        weights, returned, row_tokens, row_places, *parts = ctx.saved_tensors
        grad_rows = grads[0].index_select(0, row_tokens)
        places = row_places.view(-1)
        grad_weights = (grad_rows * returned).sum(dim=-1).index_select(0, places).view_as(weights).to(weights.dtype)
        row_weights = grad_rows.new_empty(weights.numel())
        row_weights.index_put_((places,), weights.reshape(-1).to(grad_rows.dtype))
        grad_rows.mul_(row_weights[:, None])
        arrived = ctx.instance.send(lockstep.COMBINE_BACKWARD, grad_rows, back=False)
        grad_parts = [arrived.index_select(0, rows) for rows in parts]
        ctx.instance.mark(EXPERTS + BACKWARD)
        return grad_weights, None, *grad_parts
