"""slime: by a flag, `--custom-megatron-init-path trimtab.integrations.slime.install`: docs/frameworks.md."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from trimtab.integrations.framework_options import TABLES
from trimtab.integrations.replay_plugin import ReplayPlugin
from trimtab.integrations.schedule import MicroBatchRoutes


def install(args: Any) -> SlimePlugin:
    """Balance the actor of this training process; called by slime with its arguments.

    Raises:
        InputError: see `ReplayPlugin.install`.
    """
    plugin = SlimePlugin(args)
    plugin.install()
    return plugin


class SlimePlugin(ReplayPlugin):
    """slime at 624b824a8: the stage is an environment variable, and padding is recorded with experts in turn."""

    package = "slime"
    fits = "slime 624b824a8 (0.3.1)"
    model = "slime.backends.megatron_utils.model"
    actor = "slime.backends.megatron_utils.actor"
    topk = "slime.utils.routing_replay:get_routing_replay_compute_topk"
    names = (
        "slime.backends.megatron_utils.model:get_forward_backward_func",
        "slime.backends.megatron_utils.model:train_one_step(args, model, num_microbatches)",
        "slime.backends.megatron_utils.actor:destroy_process_groups()",
        "slime.utils.routing_replay:get_routing_replay_compute_topk(old_compute_topk)",
        "slime.utils.routing_replay:register_routing_replay(module)",
        "slime.utils.routing_replay:ROUTING_REPLAY",
        "slime.utils.routing_replay:RoutingReplay.forward_index",
        "slime.utils.routing_replay:RoutingReplay.backward_index",
        "slime.utils.routing_replay:RoutingReplay.top_indices_list",
    )
    refused = TABLES["slime"]

    def stage(self) -> str | None:
        if os.environ.get("ENABLE_ROUTING_REPLAY", "0") != "1":
            return None
        return os.environ.get("ROUTING_REPLAY_STAGE", "fallthrough")

    def current(self) -> Any:
        return import_module("slime.utils.routing_replay").ROUTING_REPLAY

    def routes(self, ids: np.ndarray, layer: Any) -> MicroBatchRoutes:
        return MicroBatchRoutes(ids)

    def replaced_topk(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda old_compute_topk: self.choose(plain(old_compute_topk), old_compute_topk)
