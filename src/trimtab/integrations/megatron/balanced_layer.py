"""`BalancedLayer`: one MoE layer of a Megatron model, with what `balance` replaces in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
from torch import nn

from trimtab.errors import InputError
from trimtab.integrations.megatron.experts import Experts, GroupedExperts, experts_of
from trimtab.integrations.megatron.exporters import check_reader
from trimtab.integrations.megatron.logical_order import ADVICE, POSITIONAL, format_of, logical_shards
from trimtab.integrations.megatron.physical_dispatch import PlannedDispatcher
from trimtab.integrations.megatron.replay import SessionReplay
from trimtab.runtime import Session
from trimtab.runtime.layer.framework_layer import FrameworkLayer
from trimtab.runtime.state.expert_places import ExpertPlaces


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
        is_exported: whether an exporter runs, which may ask for names and a `state_dict()`.
        before_positional: called before something stores experts by position while they are away; they return home, or
            it raises.
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
            experts.tensors, dispatch_forwards=forwards, expert_groups=groups_of, equal_tokens=equal_tokens
        )
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
        self.is_exported: Callable[[], bool] = lambda: False
        self.before_positional: Callable[[str], None] = lambda what: None
        self._sharded_state_dict = moe_layer.experts.sharded_state_dict
        moe_layer.experts.sharded_state_dict = self._logical_state_dict
        self._named_modules = moe_layer.experts.named_modules
        moe_layer.experts.named_modules = self._guarded_modules  # type: ignore[method-assign]
        self._hooks = [
            moe_layer.experts._register_state_dict_hook(self._refuse_state_dict),
            moe_layer.experts.register_load_state_dict_pre_hook(self._refuse_state_dict),
        ]

    @property
    def places(self) -> ExpertPlaces:
        """The places of experts, with ranks in the order of Megatron's group. Another value after a move."""
        return self._dispatcher.places

    def remove(self) -> None:
        """Undo all replacements."""
        self._moe_layer.router.router_replay = self._moe_layer.router.router_replay.plain
        self._moe_layer.token_dispatcher = self._dispatcher.plain
        del self._moe_layer.experts.forward
        del self._moe_layer.experts.sharded_state_dict
        del self._moe_layer.experts.named_modules
        for hook in self._hooks:
            hook.remove()

    def _logical_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Replaces the `sharded_state_dict` of the experts' module: experts have their logical place."""
        if not self.places.are_first:
            if (metadata or {}).get("singleton_local_shards"):
                self.before_positional("singleton_local_shards stores")
            # The optimizer's shards are by position: those of the model then have to be of experts at home.
            elif format_of(metadata) in POSITIONAL:
                self.before_positional(f"the optimizer's format {format_of(metadata)} stores")
        shards: dict[str, Any] = self._sharded_state_dict(prefix, sharded_offsets, metadata)
        if not self.places.are_first:
            rows = [[prefix + name for name in names] for names in self._experts.names()]
            rank = self._moe_layer.ep_group.rank()
            shifts = self.places.experts_RH[rank] - (rank * len(rows) + np.arange(len(rows)))
            logical_shards(shards, rows, len(sharded_offsets), shifts)
        return shards

    def _guarded_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Replaces `named_modules` of the experts' module, by which torch reads the Parameters of all that it is in."""
        if not self.places.are_first and not self.is_exported():
            check_reader(f"layer {self.decoder_layer}")
        return self._named_modules(*args, **kwargs)

    def _refuse_state_dict(self, *_: Any) -> None:
        if not self.places.are_first and not self.is_exported():
            raise InputError(
                f"a state_dict of layer {self.decoder_layer} has experts by position, and they have moved; use "
                f"sharded_state_dict(), or {ADVICE}"
            )

    def _compute(self, rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Replaces the forward of the experts' module: home experts and replicas."""
        call = self._dispatcher.rows
        if call is None or not call.layer_call.replicas.count:
            return self._compute_homes(rows, counts, probs)
        if call.are_joined:
            assert isinstance(self._experts, GroupedExperts)
            rows, replicas = self._layer.use_replicas(rows, call.layer_call)
            if not replicas.count:
                return self._compute_homes(rows, counts, probs)
            with replicas.saved_for_backward(), self._experts.joined(replicas):
                return self._compute_homes(rows, counts, probs)
        outputs, bias = self._compute_homes(rows, counts, probs)
        replica_rows, replicas = self._layer.use_replicas(call.replica_rows, call.layer_call)
        if replicas.count:
            with replicas.saved_for_backward():
                replica_rows = self._experts.compute(
                    replica_rows, call.layer_call.layout.replica_groups.counts, call.replica_probs, replicas.tensors
                )
        return torch.cat([outputs, replica_rows]), bias
