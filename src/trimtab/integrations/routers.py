"""What Megatron's routers replay: the MoE layers of a model, and ids that a framework gives to their RouterReplay."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trimtab.array_type import Array
from trimtab.errors import InputError


def asks_router_replay() -> bool:
    """Whether Megatron's top-k asks the router's `router_replay`: from 0.16 on, but for forks."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    return "router_replay" in inspect.signature(topk_routing_with_score_function).parameters


def are_replaying(layers: Sequence[Any]) -> bool:
    """Whether a framework has set routers to replay a forward, and not to record or to choose."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    actions = (getattr(layer.router.router_replay, "router_replay_action", None) for layer in layers)
    return any(action == RouterReplayAction.REPLAY_FORWARD for action in actions)


def replayed_ids(layers: Sequence[Any], set_targets: Callable[[], None]) -> Array:
    """The ids that a framework's own code gives to these routers, read from them and taken away again.

    Call it before a pass: ids that routers had are gone.

    Args:
        layers: MoE layers whose routers have a `RouterReplay`.
        set_targets: gives ids to the routers, by `RouterReplay.set_target_indices`.

    Returns:
        Ids `[n, L, K]`, integers, of this rank's n tokens, on the host.

    Raises:
        InputError: if a router got none.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplay

    # The setter may reach further routers than these, and tell them to replay.
    actions = [(each, each.router_replay_action) for each in RouterReplay.global_router_replay_instances]
    try:
        set_targets()
        targets = [layer.router.router_replay.target_topk_idx for layer in layers]
    finally:
        RouterReplay.clear_global_indices()
        for router, action in actions:
            router.router_replay_action = action
    for layer, ids in zip(layers, targets, strict=True):
        if ids is None:
            raise InputError(f"the framework's replay gave no ids to the router of MoE layer {layer.layer_number}")
    found: Array = torch.stack(targets, dim=1).cpu().numpy()
    return found
