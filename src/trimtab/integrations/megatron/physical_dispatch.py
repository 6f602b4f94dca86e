"""Dispatch of planned and live calls by Megatron's own dispatcher, built for physical experts."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    _DeepepManager,
)

from trimtab.integrations.megatron.planned_sizes import multihot, planned_rows
from trimtab.runtime.layer.framework_layer import FrameworkLayer
from trimtab.runtime.layer.layer_call import LayerCall
from trimtab.runtime.program.device_kernels import multi_hot


class PlannedDispatcher:
    """Takes the place of a MoE layer's dispatcher: calls in planned and in balanced live micro-steps go to physical
    experts, others to Megatron's own.

    Args:
        layer: the layer in the session.
        replay: what its router asks for experts.
        num_slots: slots of a rank, S.
        pg_collection: Megatron's process groups.
        joins: whether replicas can be computed in one product with home experts. Live calls do not, since their
            replicas are still on the way.

    Attributes:
        plain: Megatron's dispatcher.
        call: the call to physical experts that runs now; None in other calls.
        is_joined: whether `dispatch_postprocess` returns rows of home experts and replicas together.
        replica_rows, replica_probs: else, rows `[B, H]` and weights `[B]` of this rank's replicas, if any rank has a
            replica in the call.
    """

    replica_rows: torch.Tensor
    replica_probs: torch.Tensor

    def __init__(
        self, moe_layer: MoELayer, layer: FrameworkLayer, replay: Any, num_slots: int, pg_collection: Any, joins: bool
    ) -> None:
        self.plain = self._now = moe_layer.token_dispatcher
        self.call: LayerCall | None = None
        self.is_joined = False
        self._layer, self._replay, self._router, self._joins = layer, replay, moe_layer.router, joins
        self._physical = physical_dispatcher(moe_layer, num_slots, pg_collection)
        # Without replicas the router's weights are in place, as there are no slots among the experts. DeepEP gets the
        # ids of rows, and HybridEP compiles its kernels for each number of experts.
        is_alltoall = isinstance(self._physical, PhysicalAlltoAll)
        self._at_homes = physical_dispatcher(moe_layer, 0, pg_collection) if is_alltoall else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def dispatch_preprocess(
        self, hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.call, self._now = None, self.plain
        ids, routes = self._replay.take()
        if ids is None or not routes.is_balanced:
            routes = routes or self._layer.routes()
            if ids is None and routes is not None and routes.is_balanced:
                raise RuntimeError(
                    f"MoE layer {self._layer.index}: its router did not ask router_replay for the plan's experts, in "
                    f"{_own_topk(self._router)}; let it call router_replay.get_replay_topk(), as Megatron's own does"
                )
            return self.plain.dispatch_preprocess(hidden, routing_map, probs)
        problem = None
        if routes.may_deviate:
            ids, problem = _ids_of(routing_map, ids)
        hidden, call = self._layer.begin(hidden, ids, routes, problem)
        self.call = call
        if call.replicas.count or self._at_homes is None:
            self._now = self._physical
            return start_rows(self._physical, hidden, probs.gather(1, ids), call)
        self._now, self._at_homes.layer_call = self._at_homes, call
        # A router that changes its map after the plan's experts does not change the rows.
        routing_map = torch.zeros_like(routing_map).scatter_(1, ids, value=True)
        return self._at_homes.dispatch_preprocess(hidden, routing_map, probs)

    def token_dispatch(self, hidden: torch.Tensor, probs: torch.Tensor) -> Any:
        return self._now.token_dispatch(hidden, probs)

    def dispatch_postprocess(self, hidden: torch.Tensor, probs: torch.Tensor) -> Any:
        hidden, counts, probs = self._now.dispatch_postprocess(hidden, probs)
        call = self.call
        if call is None or self._now is self._at_homes:
            return hidden, counts, probs
        homes, replicas = call.layout.home_groups.counts, call.layout.replica_groups.counts
        self.is_joined = self._joins and not call.is_live
        if counts.shape[0] == len(homes) or self.is_joined or not call.replicas.count:
            return hidden, counts[: len(homes) + len(replicas)], probs
        # The backward of `split` writes the gradient of all rows once; that of slices fills it with zeros for each.
        parts = sum(homes), hidden.shape[0] - sum(homes)
        hidden, self.replica_rows = hidden.split(parts)
        probs, self.replica_probs = probs.split(parts)
        return hidden, counts[: len(homes)], probs

    def combine_preprocess(self, outputs: torch.Tensor) -> torch.Tensor:
        return self._now.combine_preprocess(outputs)

    def token_combine(self, outputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._now.token_combine(outputs, *args, **kwargs)

    def combine_postprocess(self, outputs: torch.Tensor) -> torch.Tensor:
        combined = self._now.combine_postprocess(outputs)
        call, self.call, self._now = self.call, None, self.plain
        return combined if call is None else self._layer.end(combined, call)


def _ids_of(routing_map: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, Exception | None]:
    """The experts `[T, K]` of a router's map `[T, E]`, which may be others than `ids` of its top-k; or an error."""
    experts_T = routing_map.sum(dim=1)
    if (experts_T == ids.shape[1]).all():
        return routing_map.nonzero()[:, 1].view(ids.shape), None
    return ids, RuntimeError(
        f"a router gave tokens {int(experts_T.min())} to {int(experts_T.max())} experts; with may_deviate=True every "
        f"token should have {ids.shape[1]}"
    )


def _own_topk(router: Any) -> str:
    """The functions in the place of Megatron's own, by file and line, or the option by which it uses another one."""
    functions = [router.forward, router.routing, getattr(router_module, "topk_routing_with_score_function", None)]
    places = []
    for function in functions:
        code = getattr(function, "__code__", None)
        if code is not None and Path(code.co_filename).parent != Path(router_module.__file__).parent:
            places.append(f"{code.co_name} of {code.co_filename}:{code.co_firstlineno}")
    return ", ".join(places) or f"moe_router_load_balancing_type={router.config.moe_router_load_balancing_type!r}"


class PhysicalAlltoAll(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher for physical experts. Counts come from the plan, without exchange or sync; in
    live calls from the exchange that their replicas are chosen by.

    Args:
        moe_layer: the layer whose dispatcher it stands beside.
        num_slots: slots of a rank, S.

    Attributes:
        layer_call: the call that runs now.
    """

    layer_call: LayerCall

    def __init__(self, moe_layer: MoELayer, num_slots: int, pg_collection: Any) -> None:
        super().__init__(**_physical_experts(moe_layer, num_slots), pg_collection=pg_collection)
        self._has_slots = num_slots > 0

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Sizes of this rank's exchange, from the layout. Returns the rows `[H + S]` of its physical experts."""
        layout = self.layer_call.layout
        self.num_out_tokens = layout.physical_ids.numel()
        self.input_splits, self.output_splits = layout.send_splits, layout.recv_splits
        assert layout.arrivals is not None
        arrivals = layout.arrivals[self._has_slots]
        self.num_global_tokens_per_local_expert = arrivals.by_rank
        if self.config.moe_permute_fusion:
            # Fused kernels read the counts on the device.
            assert layout.arriving is not None
            self.num_global_tokens_per_local_expert = layout.arriving[:, : self.num_local_experts]
        return arrivals.counts


class PhysicalFlex(MoEFlexTokenDispatcher):
    """Megatron's flex dispatcher for physical experts, with its manager for DeepEP or for HybridEP.

    Both managers share one buffer in a process with the layer's own dispatcher. DeepEP's has a size that does not
    depend on the number of experts. HybridEP gets the number of experts of a rank with every dispatch: it compiles a
    kernel for each number, keeps the number in the handle that combine and backward use, and enlarges its buffer once,
    at the first call with more experts than before. This follows from the source of DeepEP, branch `hybrid-ep`. It was
    tested with replacements of `deep_ep` on a CPU, never with DeepEP or HybridEP on a GPU.

    Args:
        moe_layer: the layer whose dispatcher it stands beside.
        num_slots: slots of a rank, S.

    Attributes:
        num_experts: physical experts of all ranks.
        layer_call: the call that runs now.
    """

    layer_call: LayerCall

    def __init__(self, moe_layer: MoELayer, num_slots: int, pg_collection: Any) -> None:
        super().__init__(**_physical_experts(moe_layer, num_slots), pg_collection=pg_collection)
        self.num_experts: int = self.config.num_moe_experts
        if isinstance(self._comm_manager, _DeepepManager):
            self._comm_manager._indices_to_multihot = partial(multihot, experts=self.num_local_experts)

    def dispatch_preprocess(
        self, hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As Megatron's, but DeepEP gets the experts of the layout. Megatron finds them by the top-k of `probs`, which
        misses experts whose weight is 0. HybridEP gets the sizes of the layout, too, for which the host would
        wait."""
        self.hidden_shape = hidden.shape
        manager, layout = self._comm_manager, self.layer_call.layout
        if isinstance(manager, _DeepepManager):
            ids = layout.physical_ids.to(torch.int64)
            manager.token_indices, manager.token_probs = ids, probs.gather(1, ids)
        else:
            manager.routing_map, manager.token_probs = routing_map, probs
            # With experts of a fixed size Megatron knows the sizes before, and leaves these attributes as they are.
            manager.drop_and_pad = True
            assert layout.arrivals is not None
            manager.tokens_per_expert = layout.arrivals[1].counts
            manager.num_permuted_tokens = sum(layout.recv_splits)
        return hidden.view(-1, hidden.shape[-1]), manager.token_probs

    def token_dispatch(self, hidden: torch.Tensor, probs: torch.Tensor | None = None, **options: Any) -> Any:
        """As Megatron's, but DeepEP gets the sizes of the layout, too; see `planned_rows`."""
        manager, layout = self._comm_manager, self.layer_call.layout
        if not isinstance(manager, _DeepepManager):
            return super().token_dispatch(hidden, probs, **options)
        with planned_rows(manager.group, hidden, sum(layout.recv_splits)):
            dispatched = super().token_dispatch(hidden, probs, **options)
        assert layout.arrivals is not None
        manager.tokens_per_expert = layout.arrivals[1].counts
        return dispatched


PhysicalDispatcher = PhysicalAlltoAll | PhysicalFlex


def start_rows(
    dispatcher: PhysicalDispatcher, hidden: torch.Tensor, weights: torch.Tensor, layer_call: LayerCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """What Megatron's `dispatch_preprocess` returns for the physical experts of a call.

    Args:
        weights: `[T, K]`, the router's weights of its experts.
    """
    dispatcher.layer_call = layer_call
    routing_map, probs = multi_hot(layer_call.layout.physical_ids, weights, dispatcher.num_experts)
    return dispatcher.dispatch_preprocess(hidden, routing_map, probs)


def physical_dispatcher(moe_layer: MoELayer, num_slots: int, pg_collection: Any) -> PhysicalDispatcher:
    """A dispatcher for physical experts, of the kind that the layer has. See `PhysicalAlltoAll`."""
    plain = moe_layer.token_dispatcher
    kind = PhysicalFlex if isinstance(plain, MoEFlexTokenDispatcher) else PhysicalAlltoAll
    physical: PhysicalDispatcher = kind(moe_layer, num_slots, pg_collection)
    if plain.shared_experts is not None:
        # Computed within the dispatch, with `moe_shared_expert_overlap`.
        physical.set_shared_experts(plain.shared_experts)
    return physical


def _physical_experts(moe_layer: MoELayer, num_slots: int) -> dict[str, Any]:
    """Arguments of Megatron's dispatchers: the H + S physical experts of this rank, and a config with all of them."""
    group, local = moe_layer.ep_group, moe_layer.num_local_experts + num_slots
    config = copy.copy(moe_layer.config)
    config.num_moe_experts = group.size() * local
    first = group.rank() * local
    return {
        "num_local_experts": local,
        "local_expert_indices": list(range(first, first + local)),
        "config": config,
    }
