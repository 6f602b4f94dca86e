"""Stand-ins of the modules of SkyRL that its plugin touches, and a worker that trains a model of `megatron_runs`.

SkyRL a9564572e, below skyrl/backends/skyrl_train: utils/replay_utils.py (:165 layers, :189 the setter, :311 state of a
schedule), distributed/megatron/token_metadata.py (:40 layout, :86 packing and context parallelism),
workers/megatron/megatron_model_wrapper.py (:228 gradients are reduced in optim_step, :390 and :987 forward steps, :507
and :1183 calls of the schedule), workers/megatron/megatron_worker.py (:897 init_model, :1001 forward, :1111
forward_backward, :1308 optim_step), workers/worker.py (:384) and distributed/megatron/megatron_utils.py (:202 to :277)
of what is offloaded; skyrl/train/dataset/preprocess.py (:255) of a batch's routes.
Attention on a CPU takes a mask in place of
packed_seq_params. With SKYRL=folder of its source the first two are SkyRL's own.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from helpers.own_source import load_module, path_in

_ROOT = "skyrl.backends.skyrl_train"
WORKERS = f"{_ROOT}.workers.megatron.megatron_worker"
WRAPPER = f"{_ROOT}.workers.megatron.megatron_model_wrapper"
REPLAY = f"{_ROOT}.utils.replay_utils"
_PACKING, _LAYOUT = (f"{_ROOT}.distributed.megatron.{name}" for name in ("packing_utils", "token_metadata"))
_WORKER = f"{_ROOT}.workers.worker"
SEQUENCES = 2
"""Of a micro-batch."""


@dataclass(frozen=True)
class TokenMetadataLayout:
    attention_mask: torch.Tensor
    sequence_lengths: list[int]
    padded_sequence_lengths: list[int]


def build_token_metadata_layout(
    attention_mask: torch.Tensor, device: Any, *, packed: bool, fp8_enabled: bool
) -> TokenMetadataLayout:
    from megatron.core import parallel_state

    assert packed
    assert not fp8_enabled
    context = parallel_state.get_context_parallel_world_size()
    unit = parallel_state.get_tensor_model_parallel_world_size() * (2 * context if context > 1 else 1)
    lengths = attention_mask.sum(1).tolist()
    return TokenMetadataLayout(attention_mask.bool(), lengths, [-(-length // unit) * unit for length in lengths])


def align_token_metadata(values: torch.Tensor, layout: Any, padding: Any) -> torch.Tensor:
    """Packed values `[1, n, ...]` of `[B, T, ...]`: without padding, each sequence padded anew, and of these the first
    and last part of this context-parallel rank."""
    from megatron.core import parallel_state

    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    parts = []
    for row, padded in enumerate(layout.padded_sequence_lengths):
        sequence = torch.empty(padded, *values.shape[2:], dtype=values.dtype)
        sequence[...] = padding
        sequence[: layout.sequence_lengths[row]] = values[row, layout.attention_mask[row]]
        halves = sequence.chunk(2 * size)
        parts += [sequence] if size == 1 else [halves[rank], halves[2 * size - 1 - rank]]
    return torch.cat(parts)[None]


def setup_per_microbatch_replay_forward(
    rollout_expert_indices: torch.Tensor, router_padding_mask: torch.Tensor, attention_mask: torch.Tensor, model: Any,
    model_config: Any, metadata_layout: Any, remove_microbatch_padding: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Gives all routers of the process their ids, has them replay, and returns what else the model gets."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    assert remove_microbatch_padding
    stage = parallel_state.get_pipeline_model_parallel_rank()
    first = get_transformer_layer_offset(model_config, pp_rank=stage)
    layers = get_num_layers_to_build(model_config, pp_rank=stage)
    routers = RouterReplay.global_router_replay_instances
    # Routes of dense layers come first.
    numbers = [first + layers - len(routers) + number for number in range(len(routers))]
    own = rollout_expert_indices[:, :, numbers]
    ids = align_token_metadata(own, metadata_layout, torch.arange(own.shape[3], dtype=own.dtype))
    mask = align_token_metadata(router_padding_mask, metadata_layout, True)
    size, rank = (
        parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    )  # fmt: skip
    ids = ids.chunk(size, dim=1)[rank]
    RouterReplay.set_replay_data(list(ids.permute(2, 0, 1, 3).to(torch.int32).flatten(1, 2)))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    if model_config.sequence_parallel and stage > 0:
        mask = mask.chunk(size, dim=1)[rank]
    return {"padding_mask": mask}


def setup_per_microbatch_replay_backward() -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


@contextmanager
def router_replay_schedule(enabled: bool) -> Iterator[None]:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    def clear() -> None:
        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()

    if enabled:
        clear()
    try:
        yield
    finally:
        if enabled:
            clear()


class MegatronModelWrapper:
    def __init__(self, actor_module: Sequence[Any], config: Any) -> None:
        self.actor_module = list(actor_module)
        config.finalize_model_grads_func = lambda *_args, **_options: None
        config.no_sync_func = None
        # Of the provider, megatron_worker.py:476.
        config.variable_seq_lengths = True

    def run_pending_grad_sync(self) -> None:
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads(self.actor_module, None)

    def run(self, micro_batches: Sequence[dict[str, Any]], *, forward_only: bool) -> list[torch.Tensor]:
        """`forward` and `forward_backward_mini_batch`: the entropies of the tokens, by micro-batch."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
        from megatron.core.utils import get_model_config

        wrapper, replay, found = sys.modules[WRAPPER], sys.modules[REPLAY], []

        def loss(batch: dict[str, Any], logits: torch.Tensor) -> Any:
            entropy = vocab_parallel_cross_entropy(logits.float(), batch["next"]) * batch["is_predicted"]
            found.append(entropy.detach())
            return entropy.sum() / 16 * len(micro_batches), {}

        def forward_step(iterator: Any, model: Any) -> Any:
            batch = dict(next(iterator))
            routes, padding = batch.pop("rollout_expert_indices"), batch.pop("router_padding_mask")
            mask = batch["attention_mask"].bool()
            layout = sys.modules[_LAYOUT].build_token_metadata_layout(  # type: ignore[attr-defined]
                mask, mask.device, packed=True, fp8_enabled=False
            )
            batch |= packed(batch["sequences"], layout)
            more = {}
            if routes is not None:
                set_up: Any = replay.setup_per_microbatch_replay_forward  # type: ignore[attr-defined]
                of_layout = {"router_padding_mask": padding, "model": model, "metadata_layout": layout}
                if "metadata_layout" not in inspect.signature(set_up).parameters:
                    # In 0.3.0, megatron_model_wrapper.py:899; Megatron 0.16 takes int32.
                    of_layout, routes = {}, routes.int()
                config = get_model_config(model)
                more = set_up(
                    routes, attention_mask=mask, model_config=config, remove_microbatch_padding=True, **of_layout
                )
            output = model(batch["tokens"], batch["position"], batch["is_hidden"], **(more or {}))
            if routes is not None and not forward_only:
                replay.setup_per_microbatch_replay_backward()  # type: ignore[attr-defined]
            return output, partial(loss, batch)

        replayed = any(batch["rollout_expert_indices"] is not None for batch in micro_batches)
        with router_replay_schedule(replayed):
            wrapper.get_forward_backward_func()(  # type: ignore[attr-defined]
                forward_step_func=forward_step, data_iterator=iter(micro_batches), model=self.actor_module,
                num_microbatches=len(micro_batches), seq_length=packed_length(micro_batches[0]),
                micro_batch_size=1, forward_only=forward_only,
            )  # fmt: skip
        assert len(found) in (0, len(micro_batches)) or not parallel_state.is_pipeline_last_stage()
        return found


def packed(tokens_BT: torch.Tensor, layout: Any) -> dict[str, torch.Tensor]:
    """What the model and the loss get of a micro-batch: tokens `[1, n]` and, of each, the next one, whether that is
    predicted, its position, and which tokens it does not attend to."""
    mask = layout.attention_mask
    position = (mask.cumsum(1) - 1).clamp(min=0)
    lengths = mask.sum(1, keepdim=True)
    sequence = torch.arange(1, len(mask) + 1)[:, None].expand(mask.shape)
    align = sys.modules[_LAYOUT].align_token_metadata  # type: ignore[attr-defined]
    tokens, following, predicted, position, sequence = (
        align(value.long(), layout, 0)
        for value in (tokens_BT, tokens_BT.roll(-1, 1), position < lengths - 1, position, sequence)
    )
    is_hidden = (position[:, None, :] > position[:, :, None]) | (sequence[:, None, :] != sequence[:, :, None])
    is_hidden &= ~torch.eye(tokens.shape[1], dtype=torch.bool)
    return {
        "tokens": tokens, "next": following, "is_predicted": predicted, "position": position,
        "is_hidden": is_hidden[:, None],
    }  # fmt: skip


def packed_length(batch: dict[str, Any]) -> int:
    mask = batch["attention_mask"].bool()
    layout = sys.modules[_LAYOUT].build_token_metadata_layout(  # type: ignore[attr-defined]
        mask, mask.device, packed=True, fp8_enabled=False
    )
    return sum(layout.padded_sequence_lengths)


@dataclass
class WorkerOutput:
    loss_fn_outputs: list[torch.Tensor] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)


class Worker:
    """Its offloading, of Megatron's buffers: the same tensors without memory, then in other memory."""

    kept: Sequence[torch.Tensor] = ()

    def _buffers(self) -> list[Any]:
        return [buffer for chunk in self.actor_module for buffer in chunk.buffers + chunk.expert_parallel_buffers]  # type: ignore[attr-defined]

    def offload_to_cpu(self, offload_optimizer: bool = True, offload_model: bool = True) -> None:
        assert offload_optimizer
        assert offload_model
        self.sizes = [(each.param_data.numel(), each.grad_data.numel()) for each in self._buffers()]
        self.kept = [buffer.param_data.clone() for buffer in self._buffers()]
        for buffer in self._buffers():
            for data in (buffer.param_data, buffer.grad_data):
                data.untyped_storage().resize_(0)

    def backload_to_gpu(self) -> None:
        for buffer, kept in zip(self._buffers(), self.kept, strict=True):
            for data in (buffer.param_data, buffer.grad_data):
                data.untyped_storage().resize_(kept.numel() * data.element_size())
            buffer.param_data.copy_(kept)
            buffer.grad_data.zero_()
        self.kept = []


class MegatronPolicyWorkerBase(Worker):
    def __init__(self, *, cfg: Any) -> None:
        self.cfg = cfg
        self.model: Any = None
        self.actor_module: Any = None

    def init_model(self, model_path: Any) -> None:
        """`model_path` is the model of the test."""
        self.of_test = model_path
        self.actor_module = self.of_test.chunks
        self.model = MegatronModelWrapper(self.actor_module, self.of_test.config)

    def _replayed(self, data: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        if self.cfg.policy.megatron_config.moe_enable_routing_replay:
            return list(data)
        return [batch | {"rollout_expert_indices": None, "router_padding_mask": None} for batch in data]

    def forward(self, data: Any) -> WorkerOutput:
        for chunk in self.actor_module:
            chunk.eval()
        with torch.no_grad():
            return WorkerOutput(self.model.run(self._replayed(data), forward_only=True))

    def forward_backward(self, data: Any, loss_fn: Any = None) -> WorkerOutput:
        for chunk in self.actor_module:
            chunk.train()
        entropies = self.model.run(self._replayed(data), forward_only=False)
        return WorkerOutput(metrics={"policy_loss": float(sum(each.sum() for each in entropies))})

    def optim_step(self) -> None:
        self.model.run_pending_grad_sync()
        self.reduced = {name: each.main_grad.clone() for name, each in self.of_test.named_parameters().items()}
        self.of_test.optimizer.step()
        for chunk in self.actor_module:
            chunk.zero_grad_buffer()


def random_micro_batch(rng: np.random.Generator, length: int, experts: int, layers: int) -> dict[str, Any]:
    """Sequences padded on the left, and their routes as preprocess.py makes them: tokens without a recorded route,
    often the last ones of a sequence, and padding have the first experts."""
    tokens = torch.from_numpy(rng.integers(0, 64, (SEQUENCES, length)))
    lengths = torch.from_numpy(rng.integers(length // 2, length, SEQUENCES))
    from_end = length - torch.arange(length)
    mask = from_end <= lengths[:, None]
    ids = rng.permuted(np.broadcast_to(np.arange(experts), (SEQUENCES, length, layers, experts)), axis=-1)[..., :2]
    # SkyRL may cut a sequence, or add its end.
    missing = torch.from_numpy(rng.integers(0, 3, SEQUENCES))
    padding = ~mask | (from_end <= missing[:, None])
    routes = torch.from_numpy(ids.astype(np.uint8))
    routes = torch.where(padding[..., None, None], torch.arange(2, dtype=torch.uint8), routes)
    return {
        "sequences": tokens, "attention_mask": mask.long(), "rollout_expert_indices": routes,
        "router_padding_mask": padding,
    }  # fmt: skip


def worker_config(*, replays: bool = True) -> SimpleNamespace:
    """SkyRL's `trainer`, as its workers get it."""
    return SimpleNamespace(policy=SimpleNamespace(megatron_config=SimpleNamespace(moe_enable_routing_replay=replays)))


def _remote(**_: Any) -> Callable[[type], Any]:
    """Ray's decorator of actor classes."""
    return lambda actor: SimpleNamespace(actor=actor)


def _with_expert_bias(plain: Any) -> Any:
    """SkyRL's patch of Megatron's expert bias, whose mask of padding has no dimension of experts."""

    def apply_expert_bias(self: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        plain(self, routing_map, padding_mask if padding_mask is None else padding_mask[:, None])

    return apply_expert_bias


@contextmanager
def skyrl_modules() -> Iterator[None]:
    """SkyRL, and a Ray, that can be imported."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe.router import TopKRouter

    own: dict[str, dict[str, Any]] = {
        "ray": {"remote": _remote},
        WRAPPER: {"get_forward_backward_func": get_forward_backward_func},
        _WORKER: {"Worker": Worker},
        WORKERS: {
            "MegatronPolicyWorkerBase": MegatronPolicyWorkerBase,
            "PolicyWorker": _remote()(MegatronPolicyWorkerBase),
        },
        _PACKING: {},
        _LAYOUT: {
            "build_token_metadata_layout": build_token_metadata_layout, "align_token_metadata": align_token_metadata,
        },
        REPLAY: {
            "setup_per_microbatch_replay_forward": setup_per_microbatch_replay_forward,
            "setup_per_microbatch_replay_backward": setup_per_microbatch_replay_backward,
        },
    }  # fmt: skip
    packages = {name.rsplit(".", count)[0] for name in own if "." in name for count in range(1, name.count(".") + 1)}
    before, folder = set(sys.modules), os.environ.get("SKYRL", "")
    with ExitStack() as stack:
        stack.callback(lambda: [sys.modules.pop(name) for name in set(sys.modules) - before if name.startswith(_ROOTS)])
        if folder:
            # Of a later Megatron than the tests'.
            own[_HYBRID] = {"HybridModel": type("HybridModel", (), {})}
            packages.add(_HYBRID.rpartition(".")[0])
        for name in (*sorted(packages), *own):
            module: Any = ModuleType(name)
            module.__path__ = []
            sys.modules[name] = module
            # 0.3.0 has no layout.
            if folder and name in (_PACKING, _LAYOUT, REPLAY) and path_in(folder, name).exists():
                load_module(folder, name)
            else:
                vars(module).update(own.get(name, {}))
        bias = _with_expert_bias(TopKRouter._apply_expert_bias)
        stack.enter_context(mock.patch.object(TopKRouter, "_apply_expert_bias", bias))
        yield


_HYBRID = "megatron.core.models.hybrid.hybrid_model"
_ROOTS = ("skyrl", "ray", "trimtab.integrations.skyrl_worker", "megatron.core.models.hybrid")
