"""`ExpertLayer`: the experts of a MoE layer, distributed over ranks. It replaces the layer's local experts.

`RoutedLayer` is what all kinds of a session's MoE layers share: their home experts, and replay of the routing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.autograd.torch_engine import SubstitutedValues, once_differentiable, running_backward
from trimtab.runtime.layer.binding import bind
from trimtab.runtime.layer.dispatch import Dispatcher, run_in_two_phases
from trimtab.runtime.layer.layer_call import LayerCall, LayerCalls
from trimtab.runtime.program.grouped_products import ApplyExperts, ExpertWeight, RowGroups
from trimtab.runtime.ranks.recorder import BACKWARD, COMBINE, OTHER
from trimtab.runtime.state.home_experts import HomeExperts, parameters_of

HomeWeights = Callable[[], Sequence[torch.Tensor]]


class RoutedLayer:
    """A MoE layer of a session.

    Attributes:
        homes: this rank's experts of the layer.
        index: the layer's number among the session's layers, 0 .. L-1.
    """

    def __init__(self, calls: LayerCalls, homes: HomeExperts) -> None:
        self.homes, self.index = homes, homes.index
        self._calls = calls

    def __deepcopy__(self, _memo: object) -> RoutedLayer:
        """A layer without experts, so that copies of a model can keep weights, such as an average."""
        return object.__new__(type(self))

    def __getattr__(self, name: str) -> Any:
        # Only copies have no attributes.
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            "this model is a copy of one whose experts are in a session: it keeps weights, but "
            "can't run; copy its weights to the model in the session, or copy a model before its experts are in one"
        )

    @property
    def replays(self) -> bool:
        """Whether a call of this layer now uses recorded routing."""
        routes = self._calls.routes()
        return routes is not None and routes.replays

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The Parameters of this rank's home experts, read now; those of lists one after another."""
        return self.homes.parameters

    @property
    def home_experts(self) -> Array:
        """Ids `[E / R]` of this rank's home experts, in the order of rows in the tensors."""
        return self.homes.home_experts

    def route(self, live_ids: torch.Tensor) -> torch.Tensor:
        """Replace the router's ids by the recorded ones, if the micro-step has any.

        Call it after the router has chosen ids and before weights are computed from its logits for these ids.

        Args:
            live_ids: `[T, K]` integers, the router's choice.

        Returns:
            `[T, K]` int64, the ids for the weights and for calling the layer.
        """
        if live_ids.ndim != 2:
            raise InputError(f"MoE layer {self.index}: route() was given ids {list(live_ids.shape)}, not [T, K]")
        routes, ids = self._calls.routes(), live_ids.to(torch.int64)
        if routes is None:
            return ids
        # A layer that runs again in backward was compared in its forward.
        ids = routes.replay(self.index, ids, self._calls.counters if running_backward() is None else None)
        routes.routed[self.index] = mark(ids)
        return ids


def mark(ids: torch.Tensor) -> tuple[int, int]:
    """Address and version of ids."""
    return ids.data_ptr(), -1 if ids.is_inference() else ids._version


class ExpertLayer(RoutedLayer):
    """One MoE layer's experts, as the model calls them. Created by `Session.add_layer`.

    Attributes:
        homes: this rank's experts of the layer.
    """

    def __init__(
        self,
        calls: LayerCalls,
        homes: HomeExperts,
        apply: ApplyExperts,
        weights: HomeWeights | None,
        dispatcher: Dispatcher,
    ) -> None:
        super().__init__(calls, homes)
        self._apply = apply
        self._weights = weights
        self._dispatcher = dispatcher

    def __call__(self, hidden: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of each token's experts. Collective over the expert-parallel group.

        Args:
            hidden: `[T, H]`.
            expert_ids: `[T, K]` int64, as `route` returned them.
            expert_weights: `[T, K]`.

        Returns:
            `[T, H]`, in the dtype of `hidden`; zero for tokens that are not in the micro-step's `positions`.

        Raises:
            InputError: if the shapes are inconsistent.
            RuntimeError: in a planned micro-step, if `expert_ids` is not the tensor that `route` returned, unless the
                micro-step was entered with `may_deviate=True`.
            RanksDisagreeError: if other ranks made another call.
        """
        self._check_shapes(hidden, expert_ids, expert_weights)
        routes = self._calls.routes()
        if (
            routes is not None
            and routes.replays
            and not routes.may_deviate
            # A layer that runs again in backward has passed this check, and may get copies.
            and running_backward() is None
            and routes.routed.get(self.index) != mark(expert_ids)
        ):
            raise RuntimeError(
                f"MoE layer {self.index} was called with other expert ids than its route() returned; "
                "in a planned micro-step the recorded routing must be used, unless it is entered as "
                "micro_step(index, may_deviate=True)"
            )
        call = bind(self._calls, self.homes, expert_ids, routes)
        call.begin_forward()
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # Replica gradients are sent in this layer's backward, which autograd would otherwise skip.
            hidden = hidden.detach().requires_grad_()
        positions, tokens = call.positions, hidden
        if positions is not None:
            tokens, expert_weights = hidden.index_select(0, positions), expert_weights.index_select(0, positions)
        with torch.autocast(hidden.device.type, enabled=False):
            combined = self._run(tokens.to(self.homes.dtype), call, expert_weights).to(hidden.dtype)
        call.end_forward()
        return combined if positions is None else torch.zeros_like(hidden).index_copy(0, positions, combined)

    def _check_shapes(self, hidden: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> None:
        is_consistent = hidden.ndim == expert_ids.ndim == 2 and expert_ids.shape == expert_weights.shape
        if not is_consistent or len(hidden) != len(expert_ids):
            raise InputError(
                f"MoE layer {self.index} was given hidden {list(hidden.shape)}, ids {list(expert_ids.shape)} and "
                f"weights {list(expert_weights.shape)}; they should be [T, H], [T, K] and [T, K]"
            )

    def _run(self, hidden: torch.Tensor, call: LayerCall, expert_weights: torch.Tensor) -> torch.Tensor:
        homes = self._home_weights(in_micro_step=call.routes is not None)
        # If gradients are joined in backward, all tensors are stacks.
        hidden, *passed = _Enter.apply(hidden, call, *(homes if self.homes.joins_in_backward else ()))
        homes = passed or homes
        physical_ids = call.layout.physical_ids
        arrived = self._dispatcher.dispatch(hidden, physical_ids, expert_weights, call)

        def at_home(rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
            return self._apply([ExpertWeight(home) for home in homes], rows, groups)

        def at_replicas(rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
            rows, *slots = UseReplicas.apply(rows, call, False)
            weights = [ExpertWeight(slot, partial(_fetch_again, call, t)) for t, slot in enumerate(slots)]
            return self._apply(weights, rows, groups)

        second = call.layout.second
        if second is not None:
            stay, move = partial(at_home, groups=second.kept_groups), partial(at_replicas, groups=second.came_groups)
            outputs = [run_in_two_phases(arrived.home_rows, call, second, stay, move)]
        else:
            outputs = [at_home(arrived.home_rows, arrived.home_groups)]
            if call.replicas.count:
                # After the compute of home experts, which overlaps the transfer.
                outputs.append(at_replicas(arrived.replica_rows, arrived.replica_groups))
        combined = self._dispatcher.combine(outputs, arrived)
        left: torch.Tensor = Leave.apply(combined, call)
        return left

    def _home_weights(self, *, in_micro_step: bool) -> list[torch.Tensor | list[torch.Tensor]]:
        """One stack or list for each tensor of the home experts, in the compute dtype."""
        dtype = self.homes.dtype
        if self._weights is not None:
            return [weight.to(dtype) for weight in self._weights()]
        weights: list[torch.Tensor | list[torch.Tensor]] = []
        for t, tensor in enumerate(self.homes.tensors):
            parameters = parameters_of(tensor)
            is_list = not isinstance(tensor, torch.Tensor)
            if self.homes.are_staged[t] and in_micro_step:
                weights.append(SubstitutedValues.apply(self.homes.staged(t), is_list, *parameters))
            else:
                values = [parameter.to(dtype) for parameter in parameters]
                weights.append(values if is_list else values[0])
        return weights


def _fetch_again(call: LayerCall, tensor: int) -> torch.Tensor:
    """One tensor of the replicas, during backward."""
    return call.replica_weights()[tensor]


class _Enter(torch.autograd.Function):
    """Identity before the dispatch. Its backward runs last in the layer's backward.

    If replica gradients are joined to those of the home weights, the home weights pass through it. Its backward then
    runs on every rank after all gradients of the layer are complete.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, call: LayerCall, *homes: torch.Tensor) -> Any:
        ctx.call = call
        passed = [home.view_as(home) for home in homes]
        frozen = [p for p, trained in zip(passed, ctx.needs_input_grad[2:], strict=True) if not trained]
        ctx.mark_non_differentiable(*frozen)
        return hidden.view_as(hidden), *passed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        call: LayerCall = ctx.call
        grad_hidden, *grad_homes = grads
        # After the dispatch, which overlaps the transfer.
        if any(ctx.needs_input_grad[2:]):
            grad_homes = [*call.join_gradients(grad_homes)]
        call.mark(OTHER + BACKWARD, outside=True)
        call.end_backward()
        return grad_hidden, None, *grad_homes


class Leave(torch.autograd.Function):
    """Identity after the combine. Its backward runs first in the layer's backward."""

    @staticmethod
    def forward(ctx: Any, combined: torch.Tensor, call: LayerCall) -> torch.Tensor:
        if call.is_recorded:
            call.mark(OTHER, outside=True)
        ctx.call = call
        return combined.view_as(combined)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.call.is_recorded:
            ctx.call.mark(COMBINE + BACKWARD)
        # First, to start transfers of replicas that backward needs.
        ctx.call.begin_backward()
        return grads[0], None


class UseReplicas(torch.autograd.Function):
    """Adds replica weights to the graph, together with the rows that use them: as stacks `[count, ...]`, or apart, as
    `count` tensors after each other for each tensor of an expert.

    Autograd runs the backward when the gradients of all outputs are complete, and then the replicas' gradients are
    complete. The node exists on every rank, whether or not it holds a replica, also when a checkpoint runs the layer
    again.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, call: LayerCall, are_apart: bool) -> Any:
        ctx.call, ctx.are_apart = call, are_apart
        ctx.set_materialize_grads(False)
        call.replica_node = weakref.ref(ctx)
        outputs: list[torch.Tensor] = []
        frozen: list[torch.Tensor] = []
        for slots, is_trained in zip(call.replica_weights(), call.homes.are_trained, strict=True):
            each = slots.detach().unbind() if are_apart else [slots.detach()]
            outputs += each
            frozen += [] if is_trained else each
        ctx.mark_non_differentiable(*frozen)
        return rows.view_as(rows), *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        grad_rows, *grad_slots = grads
        call: LayerCall = ctx.call
        if any(call.homes.are_trained):
            if ctx.are_apart:
                count = len(grad_slots) // len(call.homes.are_trained)
                call.return_gradients([grad_slots[n : n + count] for n in range(0, len(grad_slots), count or 1)])
            else:
                call.return_gradients(grad_slots)
        return grad_rows, None, None
