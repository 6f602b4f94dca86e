"""A stand-in of ROLL's Megatron strategy and workers, on a small Megatron model.

ROLL 8eb27cc2: inner_forward_step, forward_step and train_step of roll/distributed/strategy/megatron_strategy.py,
set_router_replay_data of roll/third_party/megatron/router_replay_utils.py, the layout of batches that
postprocess_generate of roll/utils/functionals.py makes (padded on the right, routes of the last token and of padding
are 0), initialize of roll/pipeline/base_worker.py, register of roll/distributed/scheduler/decorator.py, and what
roll/third_party/megatron/offload_states_patch.py does to Parameters, gradients and hooks of DDP.

With ROLL=folder of its source the functions named first and the whole of router_replay_utils are ROLL's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from helpers.own_source import load_module, own_functions, path_in
from helpers.plugin_runs import ReplayActions

FLAG = "BIND_WORKER_METHOD_FLAG"
SEQUENCES = 2
"""Of a micro-batch."""


class DataProto:
    """ROLL's batches: tensors by name, cut along the first dimension."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self.batch = SizedBatch(batch)
        self.meta_info: dict[str, Any] = {"micro_batch_size": SEQUENCES}
        self.non_tensor_batch: dict[str, Any] = {}

    def chunk(self, chunks: int) -> list[DataProto]:
        parts = {name: tensor.chunk(chunks) for name, tensor in self.batch.items()}
        return [DataProto({name: part[index] for name, part in parts.items()}) for index in range(chunks)]


class SizedBatch(dict[str, torch.Tensor]):
    """As a TensorDict."""

    @property
    def batch_size(self) -> torch.Size:
        return next(iter(self.values())).shape[:1]


def random_batch(rng: np.random.Generator, micro_batches: int, length: int, experts: int, layers: int) -> DataProto:
    """Tokens, labels and recorded routes of sequences of several lengths, as after a rollout."""
    count = micro_batches * SEQUENCES
    tokens_BT = torch.from_numpy(rng.integers(0, 64, (count, length)))
    lengths = torch.from_numpy(rng.integers(length // 2, length - 1, count))
    lengths[0] = length
    is_token_BT = torch.arange(length) < lengths[:, None]
    ids = rng.permuted(np.broadcast_to(np.arange(experts), (count, length, layers, experts)), axis=-1)[..., :2]
    is_recorded_BT = torch.arange(length) < lengths[:, None] - 1
    routes = torch.from_numpy(ids.astype(np.uint8)) * is_recorded_BT[..., None, None]
    return DataProto(
        {
            "input_ids": tokens_BT, "attention_mask": is_token_BT.long(), "labels": tokens_BT.roll(-1, 1),
            "response_mask": is_token_BT.long(), "routed_experts": routes,
        }
    )  # fmt: skip


class Strategy:
    """MegatronTrainStrategy, of a model of `megatron_runs`."""

    def __init__(self, model: Any, worker_config: Any) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.of_tests, self.worker_config = model, worker_config
        self.model = VirtualModels(model)
        self.optimizer, self.scheduler = model.optimizer, SimpleNamespace(step=lambda: None)
        self.router_replay_mode = worker_config.router_replay.mode
        self.enable_router_replay = self.router_replay_mode in ("R2", "R3")
        self.forward_backward_func = get_forward_backward_func()
        # What ROLL's own functions read.
        self.models_unwrapped, self.is_multimodal, self.use_sequence_packing = model.models, False, False
        self.worker = SimpleNamespace(rank_info=SimpleNamespace(tp_rank=0, cp_rank=0, is_pipeline_last_stage=True))
        self.megatron_train_args = SimpleNamespace(gradient_accumulation_steps=2)
        self.seq_length = 16

    def inner_forward_step(self, loss_func: Callable[..., Any], data_iterator: Any, model: Any) -> Any:
        from megatron.core.transformer.moe.router_replay import RouterReplayAction as Action

        data, replay = next(data_iterator), sys.modules["roll.third_party.megatron.router_replay_utils"]
        stage = _innermost(model).vp_stage
        helper, config = replay.RouterReplayHelper, self.model.config

        def set_actions(action: Action) -> None:
            for router in helper.get_micro_batch_router_list(config, stage):
                router.set_router_replay_action(action)

        if self.enable_router_replay:
            if helper.is_replay_backward_action(config, stage):
                set_actions(Action.REPLAY_FORWARD)
            if helper.is_replay_forward_action(config, stage):
                replay.set_router_replay_data(data.batch["routed_experts"], data.batch["attention_mask"], config, stage)
        output = model(
            input_ids=data.batch["input_ids"], attention_mask=data.batch["attention_mask"], position_ids=None,
            labels=data.batch["labels"],
        )  # fmt: skip
        if self.enable_router_replay and helper.is_replay_forward_action(config, stage):
            set_actions(Action.REPLAY_BACKWARD)
        return output, partial(loss_func, data)

    def forward_step(self, batch: DataProto, forward_func: Callable[..., Any]) -> Any:
        self.model.eval()
        if self.enable_router_replay:
            self._begin_replay("routed_experts" in batch.batch)
        results = self._run(batch, forward_func, forward_only=True)
        if self.enable_router_replay:
            self._end_replay()
        return results

    def train_step(self, batch: DataProto, loss_func: Callable[..., Any]) -> dict[str, Any]:
        self.model.train()
        if self.enable_router_replay:
            assert "routed_experts" in batch.batch
            self._begin_replay(True)
        results = self._run(batch, loss_func, forward_only=False)
        if self.enable_router_replay:
            self._end_replay()
        norm = self.optimizer.step()[1]
        metrics: dict[str, Any] = {f"{self.worker_config.name}/grad_norm": norm}
        for each in results:
            for name, value in each.items():
                metrics.setdefault(name, []).append(value)
        return metrics

    def _begin_replay(self, replays: bool) -> None:
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        if replays:
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        else:
            RouterReplay.clear_global_router_replay_action()

    def _end_replay(self) -> None:
        from megatron.core.transformer.moe.router_replay import RouterReplay

        RouterReplay.clear_global_router_replay_action()
        RouterReplay.clear_global_indices()

    def _run(self, batch: DataProto, function: Callable[..., Any], *, forward_only: bool) -> Any:
        count = batch.batch.batch_size[0] // SEQUENCES
        micro_batches = batch.chunk(count)
        with torch.no_grad() if forward_only else nullcontext():
            return self.forward_backward_func(
                forward_step_func=partial(self.inner_forward_step, function),
                data_iterator=[iter(micro_batches) for _ in range(len(self.model))], model=self.model.get_models(),
                num_microbatches=count, seq_length=batch.batch["input_ids"].shape[1], micro_batch_size=SEQUENCES,
                forward_only=forward_only,
            )  # fmt: skip

    def offload_states(self, include: Any = None, non_blocking: bool = False) -> None:
        """Parameters go to other memory, gradients away; hooks of DDP with them. `include` names optimizer states."""
        if include is not None:
            return
        self.kept = [parameter.data for chunk in self.model.get_models() for parameter in chunk.parameters()]
        for chunk in self.model.get_models():
            for parameter in chunk.parameters():
                parameter.data = torch.empty(0, dtype=parameter.dtype)
                parameter.main_grad = torch.tensor(1, dtype=parameter.dtype)
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data.data = torch.tensor(1, dtype=buffer.grad_data.dtype)
            chunk.grad_accs.clear()

    def load_states(self, include: Any = None, non_blocking: bool = False) -> None:
        """Back, at other addresses."""
        from megatron.core.distributed.param_and_grad_buffer import BufferType

        if include is not None or not self.kept:
            return
        kept = iter(self.kept)
        for chunk in self.model.get_models():
            for parameter in chunk.parameters():
                parameter.data = next(kept).clone()
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data.data = torch.zeros(buffer.numel, dtype=buffer.grad_dtype)
                for parameter in buffer.params:
                    start = buffer.param_index_map[parameter][0]
                    parameter.main_grad = buffer._get(parameter.data.shape, start, buffer_type=BufferType.GRAD)
                for bucket in buffer.buckets:
                    start, end = buffer.bucket_indices[bucket.bucket_id]
                    bucket.grad_data.data = buffer._get(torch.Size([end - start]), start, buffer_type=BufferType.GRAD)
            for parameter in chunk.module.parameters():
                accumulate = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                accumulate.register_hook(chunk._make_backward_post_hook(parameter))
                chunk.grad_accs.append(accumulate)
        self.kept = []

    kept: Sequence[torch.Tensor] = ()

    def _get_feature_on_this_cp_rank(self, feature: torch.Tensor, feature_name: str = "") -> torch.Tensor:
        return feature

    def _get_batch_num_tokens(self, batch: DataProto, dp_group: Any) -> dict[str, Any]:
        return {}

    _get_global_valid_samples = _get_batch_num_tokens


class VirtualModels:
    """ROLL's list of a model's chunks."""

    def __init__(self, model: Any) -> None:
        self.models, self.config = model.chunks, model.config

    def get_models(self) -> list[Any]:
        return list(self.models)

    def __len__(self) -> int:
        return len(self.models)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.models)

    def train(self) -> None:
        for model in self.models:
            model.train()

    def eval(self) -> None:
        for model in self.models:
            model.eval()


def _innermost(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


class Worker:
    """ROLL's ActorWorker: `make_strategy` stands for create_strategy and the strategy's own initialize."""

    make_strategy: Callable[[], Any] | None = None

    def __init__(self, worker_config: Any) -> None:
        self.worker_config = worker_config
        self.strategy: Any = None

    def initialize(self, pipeline_config: Any) -> None:
        self.pipeline_config = pipeline_config
        make = type(self).make_strategy
        assert make is not None
        self.strategy = make()
        self.strategy.offload_states()


def register(dispatch_mode: Any, **_options: Any) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        setattr(function, FLAG, {"dispatch_mode": dispatch_mode})
        return function

    return decorate


def worker_config(**more: Any) -> SimpleNamespace:
    """ROLL's WorkerConfig of the actor, those values that are read."""
    values: dict[str, Any] = {
        "name": "actor_train", "router_replay": SimpleNamespace(mode="R3"), "use_sequence_packing": False,
        "use_dynamic_batching_in_train": False, "use_dynamic_batching_in_infer": False, "apply_loss_scale": False,
        "strategy_args": SimpleNamespace(strategy_name="megatron_train", strategy_config={}),
        "model_args": SimpleNamespace(lora_target=None),
        "training_args": SimpleNamespace(per_device_train_batch_size=SEQUENCES),
    }  # fmt: skip
    return SimpleNamespace(**values | more)


@contextmanager
def roll() -> Iterator[dict[str, Any]]:
    """ROLL's modules, by name, as those of this file; they can be imported. Models get a causal mask."""
    names = {
        "roll.pipeline.rlvr.actor_worker": {"ActorWorker": type("ActorWorker", (Worker,), {})},
        "roll.pipeline.agentic.agentic_actor_worker": {"ActorWorker": type("ActorWorker", (Worker,), {})},
        "roll.pipeline.dpo.actor_worker": {"ActorWorker": type("ActorWorker", (Worker,), {})},
        "roll.distributed.scheduler.decorator": {
            "register": register, "Dispatch": SimpleNamespace(ONE_TO_ALL="one to all"),
        },
        "roll.distributed.strategy.megatron_strategy": {
            "MegatronInferStrategy": Strategy, "MegatronTrainStrategy": Strategy,
        },
    }  # fmt: skip
    folder = os.environ.get("ROLL", "")
    modules: dict[str, Any] = {}
    with ExitStack() as stack:
        for name, values in names.items():
            modules[name] = ModuleType(name)
            vars(modules[name]).update(values)
            packages = name.split(".")
            for count in range(1, len(packages)):
                package = ".".join(packages[:count])
                modules.setdefault(package, ModuleType(package))
        # Its workers extend those of this stand-in.
        stack.callback(sys.modules.pop, "trimtab.integrations.roll", None)
        for name in ("roll.third_party", "roll.third_party.megatron"):
            modules[name] = ModuleType(name)
        for name, module in modules.items():
            sys.modules[name] = module
            stack.callback(sys.modules.pop, name)
        name = "roll.third_party.megatron.router_replay_utils"
        if folder:
            load_module(folder, "roll.third_party.megatron.util")
            stack.callback(sys.modules.pop, "roll.third_party.megatron.util")
        modules[name] = load_module(folder, name) if folder else _replay_utils(name)
        sys.modules[name] = modules[name]
        stack.callback(sys.modules.pop, name)
        if folder:
            for method in _methods_of(folder):
                stack.enter_context(mock.patch.object(Strategy, method.__name__, method))
        yield modules


def _replay_utils(name: str) -> ModuleType:
    module: Any = ModuleType(name)
    module.set_router_replay_data, module.RouterReplayHelper = set_router_replay_data, RouterReplayHelper
    return module  # type: ignore[no-any-return]


def set_router_replay_data(layers_topk_idx: Any, attention_mask: Any, tf_config: Any, vp_rank: Any = None) -> None:
    """Gives routers their ids, in the order of Megatron's rows: position, then sequence."""
    from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    ids_TBLK = layers_topk_idx.transpose(0, 1).contiguous()
    ids_NLK = scatter_to_sequence_parallel_region(ids_TBLK).flatten(0, 1)
    first = get_transformer_layer_offset(tf_config, vp_stage=vp_rank or 0)
    for number, router in enumerate(RouterReplayHelper.get_micro_batch_router_list(tf_config, vp_rank)):
        router.set_target_indices(ids_NLK[:, first + number].long())


class RouterReplayHelper(ReplayActions):
    @staticmethod
    def get_micro_batch_router_list(tf_config: Any, vp_rank: Any = None) -> list[Any]:
        from megatron.core.transformer.moe.router_replay import RouterReplay
        from megatron.core.transformer.transformer_block import get_num_layers_to_build

        stages = range(vp_rank or 0) if tf_config.virtual_pipeline_model_parallel_size else ()
        start = sum(get_num_layers_to_build(tf_config, stage) for stage in stages)
        return RouterReplay.global_router_replay_instances[start : start + get_num_layers_to_build(tf_config, vp_rank)]


def _methods_of(folder: str) -> list[Any]:
    """ROLL's own methods of the strategy, in a namespace of what they use."""
    from megatron.core import mpu
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    replay = sys.modules["roll.third_party.megatron.router_replay_utils"]
    names: dict[str, Any] = {
        "torch": torch, "mpu": mpu, "partial": partial, "nullcontext": nullcontext, "RouterReplay": RouterReplay,
        "RouterReplayAction": RouterReplayAction, "RouterReplayHelper": replay.RouterReplayHelper,  # type: ignore[attr-defined]
        "set_router_replay_data": replay.set_router_replay_data, "unwrap_model": _innermost,  # type: ignore[attr-defined]
        "disable_gradients": lambda models: torch.no_grad(), "collate_fn_to_dict_list": lambda values: values,
        "append_to_dict": lambda data, new: [data.setdefault(name, []).append(value) for name, value in new.items()],
        "OffloadStateType": SimpleNamespace(optimizer_states="optimizer_states"),
        "reduce_aux_losses_tracker_across_ranks": lambda: None, "clear_aux_losses_tracker": lambda: None,
        "get_moe_layer_wise_logging_tracker": moe_utils.get_moe_layer_wise_logging_tracker,
    }  # fmt: skip
    path, wanted = (
        path_in(folder, "roll.distributed.strategy.megatron_strategy"),
        ("inner_forward_step", "forward_step"),
    )
    own_functions(path, wanted, names, "MegatronInferStrategy")
    own_functions(path, ["train_step"], names, "MegatronTrainStrategy")
    return [names[name] for name in (*wanted, "train_step")]


def some_loss(data: DataProto, output_BT: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """The mean over tokens whose next token is in the sequence, as losses of ROLL's workers mask them."""
    is_read_BT = torch.zeros_like(output_BT)
    is_read_BT[:, :-1] = data.batch["response_mask"][:, 1:]
    loss = (output_BT * is_read_BT).sum() / is_read_BT.sum()
    return loss, {"actor/pg_loss": float(loss.detach())}


def log_probs(data: DataProto, output_BT: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """As ROLL's op_compute_log_probs."""
    return torch.tensor(0.0), {"log_probs": output_BT[:, :-1].detach() * data.batch["attention_mask"][:, 1:]}


def with_causal_mask(model: Any, length: int) -> None:
    """Megatron's local attention needs the mask that Transformer Engine makes itself."""
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    for each in model.models:
        each.register_forward_pre_hook(
            lambda _, args, kwargs: (
                args,
                {name: value for name, value in kwargs.items() if name != "loss_mask"}
                | {"attention_mask": mask, "position_ids": torch.arange(length)[None]},
            ),
            with_kwargs=True,
        )
