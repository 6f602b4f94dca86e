"""SkyRL's Megatron worker of the policy with balanced experts. Its import replaces `PolicyWorker` of SkyRL's module."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from trimtab.integrations.dry_replay import UNREAD, DryReplayPlugin
from trimtab.integrations.megatron.layer_numbers import moe_layers
from trimtab.integrations.skyrl import FITS, LAYOUT, LAYOUT_NAMES, REPLAY, WORKER_NAMES, WRAPPER
from trimtab.integrations.skyrl_hook import WORKERS

_ray: Any = import_module("ray")
_workers: Any = import_module(WORKERS)
_replay: Any = import_module(REPLAY)
_set_up = getattr(_replay, "setup_per_microbatch_replay_forward", lambda: None)
_HAS_LAYOUT = "metadata_layout" in inspect.signature(_set_up).parameters
"""Not in 0.3.0."""


class SkyrlPlugin(DryReplayPlugin):
    """Routes `[B, T, L, K]` are in the micro-batches. SkyRL packs and slices them for this rank's routers."""

    package = "skyrl"
    fits = FITS
    names = (*WORKER_NAMES, *(LAYOUT_NAMES if _HAS_LAYOUT else ()))

    def is_replayed(self, micro_batch: Any, layers: Sequence[Any]) -> bool:
        return micro_batch.get("rollout_expert_indices") is not None

    def set_targets(self, micro_batch: Any, chunk: nn.Module) -> None:
        routes_BTLK = micro_batch["rollout_expert_indices"]
        is_token_BT = micro_batch["attention_mask"].bool()
        # The last token of a sequence predicts nothing. SkyRL adds padding with the first expert, 0.
        is_read_BT = is_token_BT & (is_token_BT.flip(1).cumsum(1).flip(1) > 1)
        is_read_BTL1 = is_read_BT.to(routes_BTLK.dtype)[..., None, None].expand(-1, -1, routes_BTLK.shape[2], 1)
        replays = [layer.router.router_replay for layer in moe_layers([chunk])]
        _set_targets(is_read_BTL1, micro_batch, chunk)
        is_read_N1 = replays[0].target_topk_idx
        _set_targets(routes_BTLK, micro_batch, chunk)
        if self.marks_unread:
            for replay in replays:
                ids_NK = replay.target_topk_idx.int()
                replay.set_target_indices(ids_NK.masked_fill(is_read_N1 == 0, UNREAD))


def _set_targets(values_BTLK: torch.Tensor, micro_batch: Any, chunk: nn.Module) -> None:
    """As SkyRL's forward step of packed sequences."""
    from megatron.core.utils import get_model_config

    mask, more = micro_batch["attention_mask"].bool(), {}
    if _HAS_LAYOUT:
        layout: Any = import_module(LAYOUT)
        more = {
            "router_padding_mask": micro_batch["router_padding_mask"], "model": chunk,
            "metadata_layout": layout.build_token_metadata_layout(mask, mask.device, packed=True, fp8_enabled=False),
        }  # fmt: skip
    _replay.setup_per_microbatch_replay_forward(
        values_BTLK, attention_mask=mask, model_config=get_model_config(chunk), remove_microbatch_padding=True, **more
    )


class BalancedPolicyWorker(_workers.MegatronPolicyWorkerBase):  # type: ignore[misc]
    """SkyRL's worker; its passes with recorded routing are planned."""

    def __init__(self, **kwargs: Any) -> None:
        self._plugin = SkyrlPlugin()
        self._plugin.check_names()
        super().__init__(**kwargs)

    def init_model(self, *args: Any, **kwargs: Any) -> None:
        """As SkyRL's."""
        super().init_model(*args, **kwargs)
        self._plugin.balance(import_module(WRAPPER), self.actor_module)

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
