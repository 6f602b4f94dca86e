"""`FrameworkLayer`: a MoE layer that a framework's own dispatcher and matrix products run, on physical experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from trimtab.runtime.autograd.torch_engine import once_differentiable
from trimtab.runtime.layer.binding import bind
from trimtab.runtime.layer.layer import Leave, RoutedLayer, UseReplicas
from trimtab.runtime.layer.layer_call import LayerCall, LayerCalls
from trimtab.runtime.layer.micro_step import BoundRoutes
from trimtab.runtime.ranks.recorder import BACKWARD, DISPATCH, OTHER
from trimtab.runtime.state.home_experts import HomeExperts


class FrameworkLayer(RoutedLayer):
    """One MoE layer whose experts stay the framework's. Created by `Session.add_framework_layer`.

    A call in a planned or a balanced live micro-step has these parts, in this order: `begin`; the framework's dispatch
    to physical experts; its own home experts; `use_replicas`, and its product with these weights, or one product with
    those of home experts, too; its combine; `end`. Gradients of replicas are added to the `main_grad` of the home's
    parameters, or to their gradient if they have none, before autograd accumulates them and runs hooks on that.

    Attributes:
        routes: returns the routes of a call now, None outside of micro-steps; see `LayerCalls.routes`.
    """

    def __init__(self, calls: LayerCalls, homes: HomeExperts) -> None:
        super().__init__(calls, homes)
        self.routes = calls.routes

    def recorded_ids(self, routes: BoundRoutes, tokens: int, top_k: int) -> torch.Tensor | None:
        """The recorded ids `[T, K]` int64 of a call with these routes, which replay; None if it needs `route` with the
        router's choice.

        That is in a step's first micro-step, where both are compared, and where routes are unknown.
        """
        if routes.positions is not None or routes.index == 0:
            return None
        program = routes.program(self.index)
        if program is None or program.recorded_NK is None or program.known_N is not None:
            return None
        return program.recorded_NK if program.recorded_NK.shape == (tokens, top_k) else None

    def begin(
        self, hidden: torch.Tensor, expert_ids: torch.Tensor, routes: BoundRoutes, problem: Exception | None = None
    ) -> tuple[torch.Tensor, LayerCall]:
        """Start a call. Collective over the expert-parallel group if rows are unknown or may deviate, as in live
        micro-steps.

        Args:
            hidden: the layer's input, of any shape.
            expert_ids: `[T, K]`, as `route` returned them; in live micro-steps the router's choice.
            routes: those of the call, which are balanced. With others the framework runs the layer as without a
                session.
            problem: why the ids can't be used, if they may deviate; raised on all ranks.

        Returns:
            `hidden` for the dispatch, and the call.
        """
        call = bind(self._calls, self.homes, expert_ids, routes, problem)
        call.begin_forward()
        if call.has_graph and (call.replicas.count or call.is_recorded):
            if call.replicas.count and not hidden.requires_grad and any(self.homes.are_trained):
                # Ranks that have replicas alone would be without a backward, in which others wait for them.
                hidden = hidden.detach().requires_grad_()
            hidden = _Enter.apply(hidden, call, *(call.replicated_parameters() if call.replicas.count else ()))
        if call.is_recorded:
            call.mark(DISPATCH)
        return hidden, call

    def use_replicas(self, rows: torch.Tensor, call: LayerCall) -> tuple[torch.Tensor, Replicas]:
        """This rank's replicas. Waits for their transfers, so in live calls home experts should be computed before.

        Call it on every rank if `call.replicas.count` is not 0, and use the returned rows in the output.

        Args:
            rows: `[B, H]`, those of this rank's replicas, perhaps with others.
        """
        rows, *slots = UseReplicas.apply(rows, call, True)
        return rows, Replicas(call, slots)

    def end(self, combined: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """End a call, with the layer's output."""
        # Without replicas backward has nothing to start or to wait for.
        if call.has_graph and (call.replicas.count or call.is_recorded or call.is_live):
            combined = Leave.apply(combined, call)
        elif call.is_recorded:
            call.mark(OTHER, outside=True)
        call.end_forward()
        return combined


class Replicas:
    """This rank's replicas in one call.

    Attributes:
        count: number of replicas on this rank.
        tensors: for each tensor of the experts `count` tensors `[...]`, in the graph.
    """

    def __init__(self, call: LayerCall, tensors: Sequence[torch.Tensor]) -> None:
        kinds = len(call.homes.are_trained)
        self.count = len(tensors) // kinds
        self.tensors = [tensors[t * self.count : (t + 1) * self.count] for t in range(kinds)]
        self._call = call
        # All replicas of a tensor are in one memory.
        self._places = {
            each[0].untyped_storage().data_ptr(): (t, int(each[0].storage_offset()))
            for t, each in enumerate(self.tensors)
            if self.count and each[0].numel()
        }

    def gradient_memory(self, dtypes: Sequence[torch.dtype | None]) -> list[torch.Tensor | None]:
        """See `LayerCall.gradient_memory`."""
        return self._call.gradient_memory(self.count, dtypes)

    def saved_for_backward(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context for the product with the replicas. What autograd saves of their memory, which later layers use,
        is transferred again in backward."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, saved: torch.Tensor) -> torch.Tensor | _Part:
        place = self._places.get(saved.untyped_storage().data_ptr())
        if place is None:
            return saved
        tensor, start = place
        return _Part(tensor, saved.size(), saved.stride(), int(saved.storage_offset()) - start)

    def _unpack(self, packed: torch.Tensor | _Part) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        tensor = self._call.replica_weights()[packed.tensor]
        return tensor.as_strided(packed.size, packed.stride, tensor.storage_offset() + packed.offset)


class _Part(NamedTuple):
    """A view of the replicas' tensor number `tensor`, with its offset in it."""

    tensor: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Enter(torch.autograd.Function):
    """Identity on the layer's input. The Parameters of experts that have replicas are inputs too, so that autograd does
    not accumulate their gradients before those of replicas are there. Its backward runs last in the layer's backward.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, call: LayerCall, *parameters: torch.nn.Parameter) -> torch.Tensor:
        ctx.call, ctx.parameters = call, parameters
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        call: LayerCall = ctx.call
        added = call.join_parameters(ctx.parameters)
        if call.is_recorded:
            call.mark(OTHER + BACKWARD, outside=True)
        call.end_backward()
        return grads[0], None, *added
