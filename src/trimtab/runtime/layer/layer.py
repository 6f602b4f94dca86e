"""`ExpertLayer`: the experts of a MoE layer, distributed over ranks. It replaces the layer's local experts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trimtab.errors import InputError
from trimtab.runtime.autograd.torch_engine import SubstitutedValues, running_backward
from trimtab.runtime.layer.dispatch import Dispatcher
from trimtab.runtime.layer.instance import Instance, LayerCalls
from trimtab.runtime.layer.routed_layer import RoutedLayer, mark
from trimtab.runtime.layer.two_phases import run_in_two_phases
from trimtab.runtime.ranks.recorder import BACKWARD, COMBINE, OTHER
from trimtab.runtime.rows.expert_compute import ApplyExperts, ExpertWeight, RowGroups
from trimtab.runtime.state.home_experts import HomeExperts, parameters_of

HomeWeights = Callable[[], Sequence[torch.Tensor]]


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
            RuntimeError: in a planned micro-step, if `expert_ids` is not the tensor that `route` returned.
            RanksDisagreeError: if other ranks made another call.
        """
        self._check_shapes(hidden, expert_ids, expert_weights)
        routes = self._calls.routes()
        if (
            routes is not None
            and routes.replays
            # A layer that runs again in backward has passed this check, and may get copies.
            and running_backward() is None
            and routes.routed.get(self.index) != mark(expert_ids)
        ):
            raise RuntimeError(
                f"MoE layer {self.index} was called with other expert ids than its route() returned; "
                "in a planned micro-step the recorded routing must be used"
            )
        instance = self._calls.bind(self.homes, expert_ids, routes)
        instance.begin_forward()
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # Replica gradients are sent in this layer's backward, which autograd would otherwise skip.
            hidden = hidden.detach().requires_grad_()
        positions, tokens = instance.positions, hidden
        if positions is not None:
            tokens, expert_weights = hidden.index_select(0, positions), expert_weights.index_select(0, positions)
        with torch.autocast(hidden.device.type, enabled=False):
            combined = self._run(tokens.to(self.homes.dtype), instance, expert_weights).to(hidden.dtype)
        instance.end_forward()
        return combined if positions is None else torch.zeros_like(hidden).index_copy(0, positions, combined)

    def _check_shapes(self, hidden: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> None:
        is_consistent = hidden.ndim == expert_ids.ndim == 2 and expert_ids.shape == expert_weights.shape
        if not is_consistent or len(hidden) != len(expert_ids):
            raise InputError(
                f"MoE layer {self.index} was given hidden {list(hidden.shape)}, ids {list(expert_ids.shape)} and "
                f"weights {list(expert_weights.shape)}; they should be [T, H], [T, K] and [T, K]"
            )

    def _run(self, hidden: torch.Tensor, instance: Instance, expert_weights: torch.Tensor) -> torch.Tensor:
        homes = self._home_weights(in_micro_step=instance.routes is not None)
        # If gradients are joined in backward, all tensors are stacks.
        hidden, *passed = _Enter.apply(hidden, instance, *(homes if self.homes.joins_in_backward else ()))
        homes = passed or homes
        physical_ids = instance.layout.physical_ids
        arrived = self._dispatcher.dispatch(hidden, physical_ids, expert_weights, instance)

        def at_home(rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
            with instance.computing_homes():
                return self._apply([ExpertWeight(home) for home in homes], rows, groups)

        def at_replicas(rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
            rows, *slots = UseReplicas.apply(rows, instance)
            weights = [ExpertWeight(slot, partial(_fetch_again, instance, t)) for t, slot in enumerate(slots)]
            return self._apply(weights, rows, groups)

        second = instance.layout.second
        if second is not None:
            stay, move = partial(at_home, groups=second.kept_groups), partial(at_replicas, groups=second.came_groups)
            outputs = [run_in_two_phases(arrived.home_rows, instance, second, stay, move)]
        else:
            outputs = [at_home(arrived.home_rows, arrived.home_groups)]
            if instance.replicas.count:
                # After the compute of home experts, which overlaps the transfer.
                outputs.append(at_replicas(arrived.replica_rows, arrived.replica_groups))
        combined = self._dispatcher.combine(outputs, arrived)
        left: torch.Tensor = Leave.apply(combined, instance)
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


def _fetch_again(instance: Instance, tensor: int) -> torch.Tensor:
    """One tensor of the replicas, during backward."""
    return instance.replica_weights()[tensor]


class _Enter(torch.autograd.Function):
    """Identity before the dispatch. Its backward runs last in the layer's backward.

    If replica gradients are joined to those of the home weights, the home weights pass through it. Its backward then
    runs on every rank after all gradients of the layer are complete.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, instance: Instance, *homes: torch.Tensor) -> Any:
        ctx.instance = instance
        passed = [home.view_as(home) for home in homes]
        frozen = [p for p, trained in zip(passed, ctx.needs_input_grad[2:], strict=True) if not trained]
        ctx.mark_non_differentiable(*frozen)
        return hidden.view_as(hidden), *passed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        instance: Instance = ctx.instance
        grad_hidden, *grad_homes = grads
        # After the dispatch, which overlaps the transfer.
        if any(ctx.needs_input_grad[2:]):
            grad_homes = [*instance.join_gradients(grad_homes)]
        instance.mark(OTHER + BACKWARD, outside=True)
        instance.end_backward()
        return grad_hidden, None, *grad_homes


class Leave(torch.autograd.Function):
    """Identity after the combine. Its backward runs first in the layer's backward."""

    @staticmethod
    def forward(ctx: Any, combined: torch.Tensor, instance: Instance) -> torch.Tensor:
        instance.mark(OTHER, outside=True)
        ctx.instance = instance
        return combined.view_as(combined)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.instance.mark(COMBINE + BACKWARD)
        # First, to start transfers of replicas that backward needs.
        ctx.instance.begin_backward()
        return grads[0], None


class UseReplicas(torch.autograd.Function):
    """Adds replica weights to the graph, together with the rows that use them.

    Autograd runs the backward when the gradients of all outputs are complete, and then the replicas' gradients are
    complete. The node exists on every rank, whether or not it holds a replica, also when a checkpoint runs the layer
    again.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, instance: Instance) -> Any:
        ctx.instance = instance
        instance.replica_node = weakref.ref(ctx)
        slots = [slot.detach() for slot in instance.replica_weights()]
        frozen = [slot for slot, is_trained in zip(slots, instance.homes.are_trained, strict=True) if not is_trained]
        ctx.mark_non_differentiable(*frozen)
        return rows.view_as(rows), *slots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad_rows, *grad_slots = grads
        instance: Instance = ctx.instance
        if instance.homes.trained:
            instance.return_gradients(grad_slots)
        return grad_rows, None
