"""miles: by a flag, `--custom-megatron-init-path trimtab.integrations.miles.install`: docs/frameworks.md."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from trimtab.integrations.framework_options import TABLES
from trimtab.integrations.replay_plugin import ReplayPlugin
from trimtab.integrations.schedule import MicroBatchRoutes


def install(args: Any) -> MilesPlugin:
    """Balance the actor of this training process; called by miles with its arguments.

    Raises:
        InputError: see `ReplayPlugin.install`.
    """
    plugin = MilesPlugin(args)
    plugin.install()
    return plugin


class MilesPlugin(ReplayPlugin):
    """miles at 31f1ca961: a manager has stage and queues, and padding is recorded with -1.

    Its fork of Megatron has no `router_replay`, so `choose` asks Trimtab for each router.
    """

    package = "miles"
    fits = "miles 31f1ca961 (0.1.0)"
    model = "miles.backends.megatron_utils.model"
    actor = "miles.backends.megatron_utils.actor"
    topk = "miles.utils.replay_base:BaseReplayManager.get_topk_fn"
    names = (
        "miles.backends.megatron_utils.model:get_forward_backward_func",
        "miles.backends.megatron_utils.model:train_one_step(args, model, num_microbatches)",
        "miles.backends.megatron_utils.actor:destroy_process_groups()",
        "miles.utils.replay_base:BaseReplayManager.get_topk_fn(self, old_topk_fn, return_probs)",
        "miles.utils.replay_base:BaseReplayManager.register_to_module(self, module, attr_name)",
        "miles.utils.replay_base:BaseReplayManager.get_current(self)",
        "miles.utils.replay_base:BaseReplayManager.stage",
        "miles.utils.replay_base:BaseReplayManager.enabled",
        "miles.utils.replay_base:routing_replay_manager",
        "miles.utils.replay_base:Replay.forward_index",
        "miles.utils.replay_base:Replay.backward_index",
        "miles.utils.replay_base:Replay.top_indices_list",
    )
    refused = TABLES["miles"]

    @property
    def _manager(self) -> Any:
        return import_module("miles.utils.replay_base").routing_replay_manager

    def stage(self) -> str | None:
        return self._manager.stage if self._manager.enabled else None

    def current(self) -> Any:
        return self._manager.get_current()

    def routes(self, ids: np.ndarray, layer: Any) -> MicroBatchRoutes:
        """miles gives tokens without a record the first K experts. Those without a record in any layer are the last of
        each sequence, and padding."""
        from trimtab.integrations.megatron.support import auxiliary_loss

        is_unknown = (ids == -1).all(-1)
        filled = np.where(is_unknown[..., None], np.arange(ids.shape[-1], dtype=ids.dtype), ids)
        if auxiliary_loss(layer.config):
            return MicroBatchRoutes(filled)
        return MicroBatchRoutes(filled, is_unknown.all(1))

    def replaced_topk(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def get_topk_fn(manager: Any, old_topk_fn: Callable[..., Any], return_probs: bool) -> Callable[..., Any]:
            replayed = plain(manager, old_topk_fn, return_probs)
            return self.choose(replayed, old_topk_fn) if manager is self._manager else replayed

        return get_topk_fn
