"""SkyRL's Megatron worker of the policy with balanced experts. Its import replaces `PolicyWorker` of SkyRL's module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from trimtab.integrations.routers import moe_layers, replayed_targets
from trimtab.integrations.skyrl import FITS, WORKER_NAMES
from trimtab.integrations.skyrl_hook import WORKERS
from trimtab.integrations.worker_plugin import SlicedRoutes, WorkerPlugin

_ray: Any = import_module("ray")
_workers: Any = import_module(WORKERS)
_layout: Any = import_module("skyrl.backends.skyrl_train.distributed.megatron.token_metadata")
_replay: Any = import_module("skyrl.backends.skyrl_train.utils.replay_utils")


class SkyrlPlugin(WorkerPlugin):
    """Routes `[B, T, L, K]` are in the micro-batches. SkyRL packs and slices them for this rank's routers."""

    package = "skyrl"
    fits = FITS
    module = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"
    names = WORKER_NAMES

    def replays(self, arguments: Mapping[str, Any]) -> bool:
        """A micro-batch says it."""
        return True

    def routes(self, micro_batch: Any, chunks: Sequence[nn.Module]) -> SlicedRoutes | None:
        routes_BTLK = micro_batch["rollout_expert_indices"]
        if routes_BTLK is None:
            return None
        is_token_BT = micro_batch["attention_mask"].bool()
        # The last token of a sequence predicts nothing. SkyRL adds padding with the first expert, 0.
        is_read_BT = is_token_BT.flip(1).cumsum(1).flip(1) > 1
        is_read_BTL1 = (is_read_BT & is_token_BT).to(routes_BTLK.dtype)[..., None, None]
        is_read_BTL1 = is_read_BTL1.expand(-1, -1, routes_BTLK.shape[2], 1)
        layers = moe_layers(chunks)
        ids = replayed_targets(layers, partial(self._set_targets, routes_BTLK, micro_batch, chunks))
        is_read = replayed_targets(layers, partial(self._set_targets, is_read_BTL1, micro_batch, chunks))
        return SlicedRoutes(ids, is_read[0].view(-1) if is_read else None)

    def _set_targets(self, routes_BTLK: torch.Tensor, micro_batch: Any, chunks: Sequence[nn.Module]) -> None:
        """As SkyRL's forward step of packed sequences."""
        from megatron.core.utils import get_model_config

        mask = micro_batch["attention_mask"].bool()
        layout = _layout.build_token_metadata_layout(mask, mask.device, packed=True, fp8_enabled=False)
        for chunk in chunks:
            _replay.setup_per_microbatch_replay_forward(
                routes_BTLK, micro_batch["router_padding_mask"], mask, model=chunk,
                model_config=get_model_config(chunk), metadata_layout=layout, remove_microbatch_padding=True,
            )  # fmt: skip


class BalancedPolicyWorker(_workers.MegatronPolicyWorkerBase):  # type: ignore[misc]
    """SkyRL's worker; its passes with recorded routing are planned."""

    def __init__(self, **kwargs: Any) -> None:
        self._plugin = SkyrlPlugin()
        super().__init__(**kwargs)

    def init_model(self, *args: Any, **kwargs: Any) -> None:
        """As SkyRL's."""
        from megatron.core.utils import get_model_config

        super().init_model(*args, **kwargs)
        self._plugin.balance(self.actor_module, get_model_config(self.actor_module[0]))

    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        """As SkyRL's. Its metrics have the figures of balance."""
        output = super().forward_backward(*args, **kwargs)
        output.metrics.update(self._plugin.figures())
        return output

    def offload_to_cpu(self, offload_optimizer: bool = True, offload_model: bool = True) -> None:
        """As SkyRL's. Slots are made again in the next planned pass."""
        if offload_model:
            self._plugin.suspend()
        super().offload_to_cpu(offload_optimizer=offload_optimizer, offload_model=offload_model)


PolicyWorker = _workers.PolicyWorker = _ray.remote(num_gpus=1)(BalancedPolicyWorker)
