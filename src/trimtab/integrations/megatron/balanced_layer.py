"""`BalancedLayer`: one MoE layer of a Megatron model, with what `balance` replaces in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

from trimtab.integrations.megatron.experts import Experts, GroupedExperts, experts_of
from trimtab.integrations.megatron.physical_dispatch import PlannedDispatcher
from trimtab.integrations.megatron.replay import SessionReplay
from trimtab.integrations.megatron.router_tensors import is_known, tensors_by_expert
from trimtab.runtime import Session
from trimtab.runtime.layer.framework_layer import FrameworkLayer


class BalancedLayer:
    """One MoE layer of the model, with what `balance` has replaced in it.

    Args:
        numbers: of all MoE layers of the model, see `number_layers`.
        groups: Megatron's process groups.
        dispatcher: see `balance`.

    Attributes:
        number: its number among all MoE layers of the model, from 0.
        layers_of_model: MoE layers of the model.
        decoder_layer: its number among all layers of the model, from 0.
    """

    def __init__(self, moe_layer: MoELayer, numbers: Sequence[int], session: Session, groups: Any) -> None:
        self._moe_layer = moe_layer
        experts = experts_of(moe_layer.experts)
        assert experts is not None
        self._experts: Experts = experts
        forwards = isinstance(moe_layer.token_dispatcher, MoEFlexTokenDispatcher)
        config = moe_layer.config
        # Its kernels address rows by the number of tokens of a rank.
        equal_tokens = "HybridEP" if forwards and config.moe_flex_dispatcher_backend == "hybridep" else ""
        groups_of = (config.moe_router_num_groups or 1, config.moe_router_group_topk or 1)
        self._layer: FrameworkLayer = session.add_framework_layer(
            experts.tensors, dispatch_forwards=forwards, expert_groups=groups_of, equal_tokens=equal_tokens,
            by_expert=partial(tensors_by_expert, moe_layer.router) if is_known(moe_layer.router) else None,
        )  # fmt: skip
        self.decoder_layer: int = moe_layer.layer_number - 1
        self.number, self.layers_of_model = numbers.index(self.decoder_layer), len(numbers)
        # Megatron before 0.16 and forks of it have none; their routers have to ask `SessionReplay` in another way.
        plain_replay = getattr(moe_layer.router, "router_replay", None)
        replay = SessionReplay(self._layer, plain_replay, lambda: session.settings.executes_plans)
        joins = isinstance(experts, GroupedExperts)
        self._dispatcher = PlannedDispatcher(moe_layer, self._layer, replay, session.slots_per_rank, groups, joins)
        self._compute_homes = moe_layer.experts.forward
        moe_layer.router.router_replay = replay
        moe_layer.token_dispatcher = self._dispatcher
        moe_layer.experts.forward = self._compute

    def remove(self) -> None:
        """Undo all replacements."""
        self._moe_layer.router.router_replay = self._moe_layer.router.router_replay.plain
        self._moe_layer.token_dispatcher = self._dispatcher.plain
        del self._moe_layer.experts.forward

    def _compute(self, rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Replaces the forward of the experts' module: home experts and replicas."""
        dispatcher, call = self._dispatcher, self._dispatcher.call
        if call is None or not call.replicas.count:
            return self._compute_homes(rows, counts, probs)
        if dispatcher.is_joined:
            assert isinstance(self._experts, GroupedExperts)
            rows, replicas = self._layer.use_replicas(rows, call)
            if not replicas.count:
                return self._compute_homes(rows, counts, probs)
            with replicas.saved_for_backward(), self._experts.joined(replicas):
                return self._compute_homes(rows, counts, probs)
        outputs, bias = self._compute_homes(rows, counts, probs)
        replica_rows, replicas = self._layer.use_replicas(dispatcher.replica_rows, call)
        if replicas.count:
            with replicas.saved_for_backward():
                replica_rows = self._experts.compute(
                    replica_rows, call.layout.replica_groups.counts, dispatcher.replica_probs, replicas.tensors
                )
        return torch.cat([outputs, replica_rows]), bias
