"""`ExpertLayer`: the expert half of a MoE layer, spread over ranks. Takes the place of the layer's local experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trimtab.runtime.exchange import exchange_rows
from trimtab.runtime.experts import ApplyExperts, ExpertWeight
from trimtab.runtime.layout import Layout

if TYPE_CHECKING:
    from trimtab.runtime.session import Session


class ExpertLayer:
    """One MoE layer's experts. Made by `Session.add_layer`.

    Attributes:
        index: the layer's number among the session's layers, 0 .. L-1.
        parameters: this rank's home experts, stacked tensors `[E / R, ...]`.
        slots: room for this rank's replicas, a tensor `[slots, ...]` for each parameter.
    """

    def __init__(
        self, session: Session, index: int, parameters: Sequence[torch.nn.Parameter], apply: ApplyExperts, slots: int
    ) -> None:
        self.index = index
        self.parameters = parameters
        self.slots = [torch.zeros(slots, *p.shape[1:], dtype=p.dtype, device=p.device) for p in parameters]
        self._session = session
        self._apply = apply
        self._routed: torch.Tensor | None = None

    def route(self, live_ids: torch.Tensor) -> torch.Tensor:
        """The expert ids to use: the recorded ones where the micro-step has them, else `live_ids`.

        Call it between the router's choice and its weights, since replay keeps the ids and recomputes the weights.

        Args:
            live_ids: `[T, K]` integers, what the router would choose.

        Returns:
            `[T, K]` int64, for computing the weights and for calling the layer.
        """
        self._routed = self._session.replay(self.index, live_ids)
        return self._routed

    def __call__(self, hidden: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of each token's experts. A collective: every rank of the group calls it.

        Args:
            hidden: `[T, H]`.
            expert_ids: `[T, K]` int64, as `route` returned them.
            expert_weights: `[T, K]`.

        Returns:
            `[T, H]`; zero for tokens that the micro-step's `positions` leave out.

        Raises:
            RuntimeError: in a planned micro-step, if `expert_ids` is not what `route` returned.
        """
        if self._session.replays and expert_ids is not self._routed:
            raise RuntimeError(
                f"MoE layer {self.index} was called with other expert ids than its route() returned; "
                "in a planned micro-step the recorded routing must be used"
            )
        instance = self._session.bind(self, expert_ids)
        layout = instance.layout
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # Replica gradients go home from the dispatch's backward, which autograd would otherwise leave out.
            hidden = hidden.detach().requires_grad_()
        home_rows, *replica_part = _Dispatch.apply(hidden, instance, self.slots)
        outputs = [self._apply([ExpertWeight(p) for p in self.parameters], home_rows, layout.home_groups)]
        if replica_part:
            replica_rows, *replica_weights = replica_part
            outputs.append(self._apply([ExpertWeight(w) for w in replica_weights], replica_rows, layout.replica_groups))
        if instance.positions is None:
            combined: torch.Tensor = _Combine.apply(expert_weights, instance, *outputs)
            return combined
        combined = _Combine.apply(expert_weights.index_select(0, instance.positions), instance, *outputs)
        return torch.zeros_like(hidden).index_copy(0, instance.positions, combined)


@dataclass(frozen=True, eq=False)
class Instance:
    """One layer of one micro-step on one rank, bound for a forward and its backward.

    Attributes:
        layout: where rows go.
        positions: `[n]` int64, where the micro-step's tokens stand among the rows of `hidden`; None if they are all.
        group: the ranks that share the experts.
        await_replicas: waits until the slots hold the instance's replicas.
        return_gradients: takes the gradients of the slots and starts them on their way home.
    """

    layout: Layout
    positions: torch.Tensor | None
    group: dist.ProcessGroup
    await_replicas: Callable[[], None]
    return_gradients: Callable[[Sequence[torch.Tensor]], None]


class _Dispatch(torch.autograd.Function):
    """Tokens to the ranks of their experts, and replica weights into the graph.

    Autograd runs the backward once all its outputs' gradients are there. So this is the moment at which a replica's
    gradient is complete, on every rank alike, also when a checkpointed layer is run again.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, instance: Instance, slots: Sequence[torch.Tensor]) -> Any:
        layout = instance.layout
        ctx.instance = instance
        ctx.num_rows = len(hidden)
        tokens = layout.row_tokens
        if instance.positions is not None:
            tokens = instance.positions.index_select(0, tokens)
        sent = hidden.index_select(0, tokens)
        arrived = exchange_rows(sent, layout.send_splits, layout.recv_splits, instance.group)
        home_rows = arrived.index_select(0, layout.home_rows)
        if layout.replicas.count == 0:
            return (home_rows,)
        instance.await_replicas()
        return home_rows, arrived.index_select(0, layout.replica_rows), *[slot.detach() for slot in slots]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        instance: Instance = ctx.instance
        layout = instance.layout
        grad_home, *grad_replica_part = grads
        arrived = grad_home.new_empty(sum(layout.recv_splits), grad_home.shape[1])
        arrived.index_copy_(0, layout.home_rows, grad_home)
        if grad_replica_part:
            grad_rows, *grad_slots = grad_replica_part
            instance.return_gradients(grad_slots)
            arrived.index_copy_(0, layout.replica_rows, grad_rows)
        sent = exchange_rows(arrived, layout.recv_splits, layout.send_splits, instance.group)
        grad_tokens = F.embedding_bag(layout.row_places, sent, mode="sum")
        if instance.positions is None:
            return grad_tokens, None, None
        grad_hidden = grad_tokens.new_zeros(ctx.num_rows, grad_tokens.shape[1])
        return grad_hidden.index_copy_(0, instance.positions, grad_tokens), None, None


class _Combine(torch.autograd.Function):
    """Expert outputs back to the ranks of their tokens, weighted and summed over each token's experts."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, instance: Instance, *outputs: torch.Tensor) -> torch.Tensor:
        layout = instance.layout
        arrived = outputs[0].new_empty(sum(layout.recv_splits), outputs[0].shape[1])
        for rows, part in zip((layout.home_rows, layout.replica_rows), outputs, strict=False):
            arrived.index_copy_(0, rows, part)
        returned = exchange_rows(arrived, layout.recv_splits, layout.send_splits, instance.group)
        ctx.instance = instance
        ctx.num_parts = len(outputs)
        ctx.save_for_backward(weights, returned)
        return F.embedding_bag(layout.row_places, returned, per_sample_weights=weights.to(returned.dtype), mode="sum")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        instance: Instance = ctx.instance
        layout = instance.layout
        weights, returned = ctx.saved_tensors
        grad_rows = grads[0].index_select(0, layout.row_tokens)
        grad_weights = (grad_rows * returned).sum(dim=-1)[layout.row_places].to(weights.dtype)
        row_weights = weights.new_empty(weights.numel()).index_copy_(0, layout.row_places.view(-1), weights.reshape(-1))
        grad_rows.mul_(row_weights[:, None])
        arrived = exchange_rows(grad_rows, layout.send_splits, layout.recv_splits, instance.group)
        parts = (arrived.index_select(0, rows) for rows in (layout.home_rows, layout.replica_rows)[: ctx.num_parts])
        return grad_weights, None, *parts
