"""Stand-ins of the modules of NeMo-RL that its plugin touches, and a worker that trains through them.

NeMo-RL 7ea279abf: nemo_rl/models/megatron/train.py (megatron_forward_backward, :423 asks for Megatron's schedule),
router_replay.py (routes by layer, -1 for tokens whose router chooses), data.py (micro-batches, packing and its slices)
beside it, nemo_rl/models/policy/workers/megatron_policy_worker.py (the order of passes, the reference's weights in the
same Parameters). With NEMO_RL=folder the first three are NeMo-RL's own, without what they import of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import torch

from helpers.absent_modules import AbsentModules
from helpers.own_source import path_in

WORKERS = "nemo_rl.models.policy.workers.megatron_policy_worker"
_TRAIN, _REPLAY, _DATA = (f"nemo_rl.models.megatron.{name}" for name in ("train", "router_replay", "data"))
_SLICES = "nemo_rl.distributed.model_utils"


@dataclass
class ProcessedMicrobatch:
    data_dict: dict[str, Any]
    input_ids: torch.Tensor
    input_ids_cp_sharded: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    packed_seq_params: Any
    cu_seqlens_padded: torch.Tensor | None
    routed_experts: torch.Tensor | None = None
    routed_experts_cp_sharded: torch.Tensor | None = None


def _routers(model: Any) -> list[Any]:
    chunks = model if isinstance(model, list) else [model]
    return [each for chunk in chunks for each in chunk.modules() if getattr(each, "router_replay", None) is not None]


def build_router_replay_tensors(model: Any, routed_experts: torch.Tensor) -> list[torch.Tensor]:
    """The ids `[n, K]` of each router of `[B, S, L, K]`, in the order of Megatron's tokens: sequence, then batch."""
    from megatron.core import parallel_state

    routers = _routers(model)
    numbers = [number + 1 for number, is_moe in enumerate(routers[0].config.moe_layer_freq) if is_moe]
    assert routed_experts.shape[2] == len(numbers)
    ids_NLK = routed_experts.transpose(0, 1).flatten(0, 1)
    if routers[0].config.sequence_parallel:
        ids_NLK = ids_NLK.chunk(parallel_state.get_tensor_model_parallel_world_size())[
            parallel_state.get_tensor_model_parallel_rank()
        ]
    return [ids_NLK[:, numbers.index(router.layer_number)].long() for router in routers]


def shard_routed_experts_for_cp(
    routed_experts: torch.Tensor, token_identity: None, seq_lengths: torch.Tensor, cu_seqlens: torch.Tensor,
    cu_seqlens_padded: torch.Tensor, cp_rank: int, cp_size: int,
) -> tuple[torch.Tensor, torch.Tensor, None, None]:  # fmt: skip
    """Packed ids `[1, T, L, K]`, whose padding has the first K experts, and this rank's first and last part of each
    sequence."""
    whole, parts = [], []
    for row, length in enumerate(seq_lengths.tolist()):
        padded = int(cu_seqlens_padded[row + 1] - cu_seqlens_padded[row])
        padding = torch.arange(routed_experts.shape[-1], dtype=routed_experts.dtype).expand(
            padded - length, *routed_experts.shape[2:]
        )
        whole.append(torch.cat([routed_experts[row, :length], padding]))
        halves = whole[-1].chunk(2 * cp_size)
        parts += [whole[-1]] if cp_size == 1 else [halves[cp_rank], halves[2 * cp_size - 1 - cp_rank]]
    return torch.cat(whole)[None], torch.cat(parts)[None], None, None


def _set_forward(model: Any, routed_experts: torch.Tensor) -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    for router, ids in zip(_routers(model), build_router_replay_tensors(model, routed_experts), strict=True):
        router.router_replay.set_target_indices(ids)
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def _set_backward(model: Any) -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    for router in _routers(model):
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


def _clear(model: Any) -> None:
    for router in _routers(model):
        router.router_replay.clear_router_replay_action()
        router.router_replay.clear_indices()


def _choosing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`RouterReplay.get_replay_topk`, where tokens with -1 get what the router chooses."""

    def get_replay_topk(
        self: Any, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any, default_compute_topk: Any
    ) -> Any:
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        if self.router_replay_action == RouterReplayAction.REPLAY_FORWARD:
            ids = self.target_topk_idx
            own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
            ids = self.target_topk_idx = torch.where(ids < 0, own, ids)
            self.replay_backward_list[-1] = ids.detach()
        return plain(self, scores, topk, num_groups, group_topk, default_compute_topk)

    return get_replay_topk


class LossPostProcessor:
    """What a micro-batch's output is given to; the test's classes are its subclasses."""


def _forward_step(
    data_iterator: Any, model: Any, post_processing_fn: Any, use_router_replay: bool, router_replay_train: bool
) -> Any:
    batch = next(data_iterator)
    if use_router_replay:
        _set_forward(model, batch.routed_experts_cp_sharded)
    output = model(
        input_ids=batch.input_ids_cp_sharded, position_ids=batch.position_ids, attention_mask=batch.attention_mask
    )
    if use_router_replay and router_replay_train:
        _set_backward(model)
    return output, post_processing_fn(data_dict=batch.data_dict)


class _Train(ModuleType):
    def __init__(self) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        super().__init__(_TRAIN)
        self.get_forward_backward_func = get_forward_backward_func
        self.forward_with_post_processing_fn = _forward_step
        self.LossPostProcessor = LossPostProcessor

    def megatron_forward_backward(
        self, model: Any, data_iterator: Any, num_microbatches: int, seq_length: int, mbs: int,
        post_processing_fn: Any, forward_only: bool = False, use_router_replay: bool = False,
        router_replay_train: bool = False,
    ) -> Any:  # fmt: skip
        forward_step = partial(
            _forward_step, post_processing_fn=post_processing_fn, use_router_replay=use_router_replay,
            router_replay_train=router_replay_train,
        )  # fmt: skip
        try:
            return self.get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=data_iterator, model=model,
                num_microbatches=num_microbatches, seq_length=seq_length, micro_batch_size=mbs,
                decoder_seq_length=seq_length, forward_only=forward_only,
            )  # fmt: skip
        finally:
            if use_router_replay:
                _clear(model)


class _Source(AbsentModules):
    """Modules of NeMo-RL's source that the plugin touches; others have any name."""

    def __init__(self, folder: str) -> None:
        anything: Callable[[str], Any] = lambda name: -1 if name.endswith("_SENTINEL") else MagicMock(name=name)  # noqa: E731
        super().__init__(("nemo_rl", "megatron.bridge"), anything)
        self._folder = folder

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name in (_TRAIN, _REPLAY, _DATA, _SLICES):
            return importlib.util.spec_from_file_location(name, path_in(self._folder, name))
        return super().find_spec(name, path, target)


class PolicyWorkerImpl:
    """The passes of MegatronPolicyWorkerImpl, of a model that is given to it."""

    def __init__(self, config: dict[str, Any], *, model: Any) -> None:
        self.cfg, self.of_test, self.model = config, model, model.chunks[0]
        generator = torch.Generator().manual_seed(1)
        self.reference_state_dict = {
            name: value + 0.1 * torch.randn(value.shape, generator=generator, dtype=value.dtype)
            for name, value in self.model.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
        self.offloads = 0

    def _pass(self, batches: Sequence[Any], *, train: bool, replay: bool) -> list[float]:
        module: Any = sys.modules[_TRAIN]
        loss = loss_of(module)
        module.megatron_forward_backward(
            model=self.model, data_iterator=iter(batches), num_microbatches=len(batches),
            seq_length=batches[0].input_ids.shape[1], mbs=len(batches[0].input_ids), post_processing_fn=loss,
            forward_only=not train, use_router_replay=replay, router_replay_train=train,
        )  # fmt: skip
        found: list[float] = loss.losses
        return found

    def train(self, data: Sequence[Any], loss_fn: Any = None, eval_mode: bool = False) -> dict[str, Any]:
        self.of_test.zero()
        losses = self._pass(data, train=True, replay=self.cfg["router_replay"]["enabled"])
        return {"global_loss": sum(losses), "moe_metrics": {"load_balancing_loss": 0.0}}

    def begin_train_step(self) -> None:
        """As for streamed chunks of a step, whose gradients are reduced once."""
        self.of_test.zero()
        config = self.of_test.config
        self.hooks = config.no_sync_func, config.finalize_model_grads_func
        config.no_sync_func, config.finalize_model_grads_func = nullcontext, None

    def train_microbatch(self, data: Sequence[Any]) -> None:
        with self.model.no_sync():
            self._pass(data, train=True, replay=True)

    def finish_train_step(self) -> dict[str, Any]:
        config = self.of_test.config
        config.no_sync_func, config.finalize_model_grads_func = self.hooks
        config.finalize_model_grads_func([self.model], None)
        return {}

    def get_logprobs(self, *, data: Sequence[Any], require_router_replay: bool = True) -> list[float]:
        with torch.no_grad():
            replay = self.cfg["router_replay"]["enabled"] and require_router_replay
            return self._pass(data, train=False, replay=replay)

    def get_reference_policy_logprobs(self, *, data: Sequence[Any]) -> list[float]:
        kept = {name: torch.clone(value) for name, value in self.model.state_dict().items() if value is not None}
        with torch.no_grad():
            self._copy(self.reference_state_dict)
            found = self.get_logprobs(data=data, require_router_replay=False)
            self._copy(kept)
        return found

    def _copy(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in self.model.state_dict().items():
            if isinstance(value, torch.Tensor):
                value.copy_(state[name])

    def offload_before_refit(self) -> None:
        self.offloads += 1


def loss_of(train: Any) -> Any:
    """A loss post-processor: cross-entropy of the tokens that a sequence has next; `losses` of the micro-batches."""

    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    class Loss(train.LossPostProcessor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.losses: list[float] = []

        def __call__(self, data_dict: dict[str, Any], **_: Any) -> Callable[[torch.Tensor], Any]:
            def loss(logits: torch.Tensor) -> Any:
                entropy = vocab_parallel_cross_entropy(logits.float(), data_dict["next"])
                # What is not predicted is not read.
                found = (entropy * data_dict["is_predicted"]).sum() / 16
                self.losses.append(float(found.detach()))
                return found, {"loss": self.losses[-1]}

            return loss

    return Loss()


def micro_batch(tokens_BS: torch.Tensor, lengths_B: torch.Tensor, routes: torch.Tensor, *, packed: bool) -> Any:
    """A micro-batch as `process_microbatch` makes it, of this rank's slices in context parallelism. Attention is to
    earlier tokens of the sequence, by a mask. Packed sequences are padded to multiples of 8.

    Args:
        routes: `[B, S, L, K]`; those of padding are not used.
    """
    from megatron.core import parallel_state

    data: Any = sys.modules[_DATA]
    rows, width = tokens_BS.shape
    position = torch.arange(width).expand(rows, width)
    is_padding = position >= lengths_B[:, None]
    # Of each token: its number, the next one, whether that is predicted, its position and sequence; 0 of padding.
    values = [
        tokens_BS, tokens_BS.roll(-1, 1), position < lengths_B[:, None] - 1, position,
        torch.arange(1, rows + 1)[:, None].expand(rows, width),
    ]  # fmt: skip
    cu = None
    if packed:
        cu = torch.cat([torch.zeros(1), ((lengths_B + 7) // 8 * 8).cumsum(0)]).int()
        ranks = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()

        def slices(value: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = data._shard_routed_experts_for_cp(value, None, lengths_B, cu, cu, *ranks)[1]
            return found

        routes = slices(routes)
        values = [slices(each[:, :, None, None].long())[:, :, 0, 0] for each in values]
    else:
        routes = torch.where(is_padding[:, :, None, None], torch.arange(routes.shape[-1], dtype=routes.dtype), routes)
    tokens, following, predicted, position, sequence = values
    is_hidden = (position[:, None, :] > position[:, :, None]) | (sequence[:, None, :] != sequence[:, :, None])
    # Each token attends to itself.
    is_hidden &= ~torch.eye(tokens.shape[1], dtype=torch.bool)
    fields = {"input_ids": tokens_BS, "input_lengths": lengths_B, "next": following, "is_predicted": predicted}
    return data.ProcessedMicrobatch(
        data_dict=_Data(fields), input_ids=tokens, input_ids_cp_sharded=tokens, attention_mask=is_hidden[:, None],
        position_ids=position, packed_seq_params=SimpleNamespace() if packed else None, cu_seqlens_padded=cu,
        routed_experts=routes, routed_experts_cp_sharded=routes,
    )  # fmt: skip


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


def _remote(**_: Any) -> Callable[[type], Any]:
    """Ray's decorator of actor classes."""
    return lambda actor: SimpleNamespace(actor=actor)


@contextmanager
def nemo_rl_modules() -> Iterator[None]:
    """NeMo-RL, and a Ray, that can be imported."""
    folder = os.environ.get("NEMO_RL")
    before = set(sys.modules)
    with ExitStack() as stack:
        stack.callback(lambda: [sys.modules.pop(name) for name in set(sys.modules) - before if name.startswith(_ROOTS)])
        modules = [
            _module("ray", remote=_remote),
            _module(WORKERS, MegatronPolicyWorkerImpl=PolicyWorkerImpl),
            _module("nemo_rl.models.policy.utils", get_runtime_env_for_policy_worker=lambda policy_worker_name: {}),
        ]
        if folder:
            source = _Source(folder)
            sys.meta_path.insert(0, source)
            stack.callback(sys.meta_path.remove, source)
        else:
            from megatron.core.transformer.moe.router_replay import RouterReplay

            packages = ("nemo_rl", "nemo_rl.models", "nemo_rl.models.megatron", "nemo_rl.models.policy")
            modules += [_module(name, __path__=[]) for name in (*packages, WORKERS.rpartition(".")[0])]
            modules += [
                _Train(),
                _module(_REPLAY, build_router_replay_tensors=build_router_replay_tensors),
                _module(
                    _DATA, ProcessedMicrobatch=ProcessedMicrobatch,
                    _shard_routed_experts_for_cp=shard_routed_experts_for_cp,
                ),
            ]  # fmt: skip
            choosing = _choosing(RouterReplay.get_replay_topk)
            stack.enter_context(mock.patch.object(RouterReplay, "get_replay_topk", choosing))
        sys.modules.update({module.__name__: module for module in modules})
        if folder:
            _use_source(stack)
        yield


_ROOTS = ("nemo_rl", "ray", "megatron.bridge", "trimtab.integrations.nemo_rl_worker")


def _use_source(stack: ExitStack) -> None:
    """Attention on a CPU takes a mask in place of the boundaries of packed sequences. There is no draft model."""
    train = importlib.import_module(_TRAIN)
    plain = train.model_forward
    stack.enter_context(
        mock.patch.multiple(
            train,
            model_forward=lambda *args, packed_seq_params=None, **more: plain(*args, **more),
            get_capture_context=lambda *_: (nullcontext(), None),
        )
    )


class _Data(dict[str, Any]):
    """As `BatchedDataDict`, without images."""

    def get_multimodal_dict(self, **_: Any) -> dict[str, Any]:
        return {}
