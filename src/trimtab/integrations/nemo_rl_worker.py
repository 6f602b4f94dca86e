"""NeMo-RL's Megatron worker with balanced experts, which its actors are made of; see `nemo_rl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from trimtab.integrations.dry_replay import UNREAD, DryReplayPlugin
from trimtab.integrations.megatron.layer_numbers import moe_layers
from trimtab.integrations.nemo_rl import FITS, WORKER_NAMES, WORKERS


class NemoRlPlugin(DryReplayPlugin):
    """Routes are in the micro-batches, in the order of this rank's tokens but for sequence parallelism."""

    package = "nemo_rl"
    fits = FITS
    names = WORKER_NAMES

    def replays(self, arguments: Mapping[str, Any]) -> bool:
        """The reference's pass has routes too, and does not replay them."""
        return bool(getattr(arguments["forward_step_func"], "keywords", {}).get("use_router_replay"))

    def is_replayed(self, micro_batch: Any, layers: Sequence[Any]) -> bool:
        return True

    def set_targets(self, micro_batch: Any, chunk: nn.Module) -> None:
        slices = import_module("nemo_rl.models.megatron.router_replay").build_router_replay_tensors
        routes = micro_batch.routed_experts_cp_sharded
        # As routes with one expert for each token, so that the same code cuts them.
        is_read = _is_read(micro_batch)[:, :, None, None].expand(-1, -1, routes.shape[2], 1)
        parts = zip(moe_layers([chunk]), slices([chunk], routes), slices([chunk], is_read), strict=True)
        for layer, ids, is_read_N1 in parts:
            # NeMo-RL has -1 where a route is unknown.
            marked = ids.masked_fill(ids < 0, UNREAD - 1)
            if self.marks_unread:
                marked = marked.masked_fill(is_read_N1 == 0, UNREAD)
            layer.router.router_replay.set_target_indices(marked)


def _is_read(micro_batch: Any) -> torch.Tensor:
    """Which tokens of a micro-batch `[B, S]` or, packed, `[1, T]` predict a token: 1, and 0 for the last one of a
    sequence and for padding."""
    data = micro_batch.data_dict
    lengths = data["input_lengths"].to(data["input_ids"].device)
    position = torch.arange(data["input_ids"].shape[1], device=lengths.device)
    is_read = (position < lengths[:, None] - 1).to(torch.int8)
    if micro_batch.packed_seq_params is None:
        return is_read
    from megatron.core import parallel_state

    # Its padding is the first expert, 0.
    packed = import_module("nemo_rl.models.megatron.data")._shard_routed_experts_for_cp(
        is_read[:, :, None, None], None, lengths, micro_batch.cu_seqlens_padded, micro_batch.cu_seqlens_padded,
        parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size(),
    )[1]  # fmt: skip
    found: torch.Tensor = packed[:, :, 0, 0]
    return found


_ray: Any = import_module("ray")
_Impl: Any = import_module(WORKERS).MegatronPolicyWorkerImpl
_runtime_env: Any = import_module("nemo_rl.models.policy.utils").get_runtime_env_for_policy_worker


class BalancedPolicyWorkerImpl(_Impl):
    """NeMo-RL's worker; its passes that replay routing are planned."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._plugin = NemoRlPlugin()
        self._plugin.check_names()
        super().__init__(*args, **kwargs)
        self._plugin.balance(import_module("nemo_rl.models.megatron.train"), [self.model])

    def train(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As NeMo-RL's. Its `moe_metrics` have the figures of balance."""
        return self._with_figures(super().train(*args, **kwargs))

    def finish_train_step(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As NeMo-RL's, and `train`."""
        return self._with_figures(super().finish_train_step(*args, **kwargs))

    def offload_before_refit(self) -> None:
        """As NeMo-RL's, which hands the device to the generation. Slots are made again in the next planned pass."""
        self._plugin.suspend()
        super().offload_before_refit()

    def _with_figures(self, metrics: dict[str, Any]) -> dict[str, Any]:
        figures = {name.rpartition("/")[2]: value for name, value in self._plugin.figures().items()}
        if figures:
            metrics["moe_metrics"] = metrics.get("moe_metrics", {}) | figures
        return metrics


BalancedPolicyWorker = _ray.remote(runtime_env=_runtime_env("megatron_policy_worker"))(BalancedPolicyWorkerImpl)
