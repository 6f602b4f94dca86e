"""A stand-in of ms-swift's Megatron GRPO trainer, on a small Megatron model.

ms-swift 3602360a (4.6.0.dev0): swift/megatron/utils/router_replay_utils.py, BaseMegatronTrainer.train_step of
swift/megatron/trainers/base.py:921, forward_step and _maybe_compute_logps of trainers/grpo_trainer.py:877 and :634,
compute_per_token_logps_fn, prepare_batch and the offload of trainers/utils.py:407, :374 and :98, get_packed_seq_params
of megatron/utils/utils.py:232, get_batch_on_this_cp_rank of megatron/utils/megatron_lm_utils.py:720, packed batches as
_data_collator of swift/template/base.py:1909 and build_routed_experts_batch of swift/rlhf_trainers/utils.py:2049 make
them, import_external_file of swift/utils/utils.py:404, and split_cp_inputs of mcore-bridge f020e479,
mcore_bridge/utils/megatron_utils.py:42.

`ms_swift_modules` makes modules of these. Log-probabilities stay packed: what follows them is not the stand-in's
subject.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from helpers.plugin_runs import ReplayActions

BASE, UTILS = "swift.megatron.trainers.base", "swift.megatron.utils"
REPLAY, TRAINERS = f"{UTILS}.router_replay_utils", "swift.megatron.trainers.utils"
GRPO, RL_UTILS = "swift.megatron.trainers.grpo_trainer", "swift.rlhf_trainers.utils"


def swift(name: str) -> Any:
    """One of ms-swift's modules."""
    return sys.modules[name]


class BaseMegatronTrainer:
    """The trainer's part that runs Megatron's schedule. `args.of_tests` has the models that ms-swift would build."""

    compute_per_token_logps: Callable[..., Any]
    forward_step: Callable[..., Any]

    def __init__(self, args: Any, template: Any) -> None:
        self.enable_routing_replay = args.router_replay_mode != "disabled"
        if self.enable_routing_replay:
            swift(REPLAY).apply_router_replay_patch()
        self.args, self.template = args, template
        self.unwrapped_models: list[Any] = []
        self.prepare_model()
        self.opt_param_scheduler = SimpleNamespace(step=lambda increment: None)
        self.logged: list[dict[str, Any]] = []
        self._train_metrics: dict[str, Any] = {}

    def prepare_model(self) -> None:
        actor = self.args.of_tests.actor
        self.unwrapped_models, self.wrapped_models = actor.models, actor.chunks
        self.config, self.optimizer = self.args.of_tests.config or actor.config, actor.optimizer

    def run_train_step(self, train_data_iterator: Any) -> None:
        metrics, grad_norm, _ = self.train_step(train_data_iterator)
        self._train_metrics["loss"] = [each["loss"] for each in metrics]
        self._train_metrics["grad_norm"] = grad_norm
        self.logged.append(self._train_metrics)
        self._train_metrics = {}

    def train_step(self, train_data_iterator: Any) -> Any:
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        forward_backward_func = swift(BASE).get_forward_backward_func()
        for model in self.wrapped_models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        data_iterator = self._replace_data_iterator(train_data_iterator)
        if self.enable_routing_replay:
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        metrics = forward_backward_func(
            forward_step_func=self.forward_step, data_iterator=data_iterator, model=self.wrapped_models,
            num_microbatches=self.args.num_microbatches, seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size, forward_only=False,
        )  # fmt: skip
        is_successful, grad_norm, _ = self.optimizer.step()
        if self.enable_routing_replay:
            RouterReplay.clear_global_router_replay_action()
            RouterReplay.clear_global_indices()
        return metrics, grad_norm, is_successful

    def _replace_data_iterator(self, data_iterator: Any) -> Any:
        from megatron.core.rerun_state_machine import RerunDataIterator

        return RerunDataIterator(data_iterator)

    def _prepare_batch(self, data: dict[str, Any]) -> dict[str, Any]:
        batch: dict[str, Any] = swift(TRAINERS).prepare_batch(self.args, data)
        return batch


class MegatronRLHFTrainer(BaseMegatronTrainer):
    def prepare_model(self) -> None:
        super().prepare_model()
        self.ref_models = self.args.of_tests.reference.models
        for model in self.ref_models:
            model.requires_grad_(False)
            model.eval()

    @contextmanager
    def null_ref_context(self) -> Iterator[Any]:
        yield self.ref_models

    def compute_per_token_logps(
        self, model: Any, data_iterator: Any, no_grad: bool = True, temperature: float = 1.0
    ) -> Any:
        return swift(TRAINERS).compute_per_token_logps_fn(
            model, self.args, data_iterator, temperature=temperature, no_grad=no_grad,
            enable_routing_replay=self.enable_routing_replay,
        )  # fmt: skip


class MegatronGRPOTrainer(MegatronRLHFTrainer):
    # What ms-swift's own methods read.
    beta, temperature, use_teacher_api, compute_entropy = 0.04, 1.0, False, False
    _has_teacher_explicit = _is_dynamic_self_distillation = False

    @property
    def micro_batch_size(self) -> int:
        size: int = self.args.micro_batch_size
        return size

    def _maybe_compute_logps(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Log-probabilities of reference and policy, without Megatron's schedule."""
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        grpo_batch = batch.pop("grpo_batch")
        with self.null_ref_context() as ref_models:
            grpo_batch.ref_per_token_logps = self.compute_per_token_logps(ref_models[0], iter([deepcopy(batch)]))[0]
        actions = {"R2": RouterReplayAction.RECORD, "R3": RouterReplayAction.REPLAY_FORWARD}
        if self.enable_routing_replay:
            RouterReplay.set_global_router_replay_action(actions[self.args.router_replay_mode])
        grpo_batch.old_per_token_logps, routes = self.compute_per_token_logps(
            self.unwrapped_models[0], iter([deepcopy(batch)]), temperature=self.temperature
        )
        if self.enable_routing_replay:
            batch["routed_experts"] = routes
            RouterReplay.clear_global_indices()
            RouterReplay.clear_global_router_replay_action()
        batch["grpo_batch"] = grpo_batch
        return batch

    def forward_step(self, data_iterator: Any, model: Any) -> Any:
        from megatron.core.transformer.moe.router_replay import RouterReplayAction as Action

        data, replay = next(data_iterator), swift(REPLAY)
        helper, config = replay.RouterReplayHelper, model.config
        grpo_batch = data.pop("grpo_batch")
        data = self._prepare_batch(data)

        def set_actions(action: Action) -> None:
            for router in helper.get_micro_batch_router_list(config):
                router.set_router_replay_action(action)

        if self.enable_routing_replay and helper.is_replay_backward_action(config):
            set_actions(Action.REPLAY_FORWARD)
        if self.enable_routing_replay and helper.is_replay_forward_action(config):
            replay.set_router_replay_data(data.pop("routed_experts", None), config)
        labels = data.pop("labels")
        output = model(**data)
        if _is_last_stage():
            output = per_token_log_probs(output, labels)[0]
        if self.enable_routing_replay and helper.is_replay_forward_action(config):
            set_actions(Action.REPLAY_BACKWARD)
        return output, partial(self.loss_func, data={"grpo_batch": grpo_batch, "labels": labels})

    def loss_func(self, output_tensor: torch.Tensor, data: dict[str, Any]) -> Any:
        """Log-probabilities of labels, each with a weight of its own in place of an advantage."""
        weights = (data["labels"] != -100) * (1 + data["labels"] % 3)
        loss = -(output_tensor * weights).sum() / weights.sum().clamp(min=1)
        return loss, {"loss": float(loss.detach())}


def per_token_log_probs(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    """In place of compute_logps_and_entropy_from_logits: log-probabilities `[1, T]`."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return -vocab_parallel_cross_entropy(logits, labels.clamp(min=0)), None


def _is_last_stage() -> bool:
    from megatron.core import parallel_state

    found: bool = parallel_state.is_pipeline_last_stage()
    return found


def prepare_batch(args: Any, data: dict[str, Any], vp_stage: Any = None) -> dict[str, Any]:
    data["labels"] = torch.roll(data["labels"], -1, dims=-1)
    batch = dict(data)
    if not _is_last_stage():
        batch["labels"] = None
    positions, lengths = batch["position_ids"], batch.pop("seq_lens")
    batch["packed_seq_params"] = swift(f"{UTILS}.utils").get_packed_seq_params(args, positions)
    batch["packed_seq_params"].seq_lens = torch.tensor(lengths)
    batch.setdefault("attention_mask", None)
    found: dict[str, Any] = swift(UTILS).get_batch_on_this_cp_rank(args, batch)
    return found


def get_packed_seq_params(args: Any, position_ids: torch.Tensor) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = (position_ids.flatten() == 0).nonzero().flatten()
    cu = torch.cat([starts, torch.tensor([position_ids.numel()])]).int()
    return PackedSeqParams(cu_seqlens_q=cu, cu_seqlens_kv=cu, qkv_format="thd")


def get_batch_on_this_cp_rank(args: Any, batch: dict[str, Any]) -> dict[str, Any]:
    for name in ("labels", "position_ids", "input_ids"):
        if args.context_parallel_size > 1 and batch.get(name) is not None:
            batch[name] = split_cp_inputs(batch[name], batch["packed_seq_params"].cu_seqlens_q, -1)
    return batch


def split_cp_inputs(inputs: torch.Tensor, cu_seqlens: torch.Tensor, dim: int) -> torch.Tensor:
    """Of each sequence, cut into two parts for each rank, the parts of this rank: one of the first half, one of the
    last."""
    from megatron.core import parallel_state

    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    if size == 1:
        return inputs
    found: list[torch.Tensor] = []
    for sequence in inputs.split(cu_seqlens.diff().tolist(), dim):
        parts = sequence.chunk(2 * size, dim)
        found += [parts[rank], parts[2 * size - 1 - rank]]
    return torch.cat(found, dim)


def forward_step_helper(model: Any, inputs: dict[str, Any]) -> Any:
    """The model's forward, with activations from the stage before and to the next one."""
    from megatron.core import parallel_state as groups

    config = model.config
    if not groups.is_pipeline_first_stage():
        shape = torch.empty(3, dtype=torch.int64)
        dist.recv(shape, groups.get_pipeline_model_parallel_prev_rank())
        received = torch.empty(shape.tolist(), dtype=config.params_dtype)
        dist.recv(received, groups.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(received)
    output = model(**inputs)
    if _is_last_stage():
        return output
    for each in (torch.tensor(output.shape), output):
        dist.send(each, groups.get_pipeline_model_parallel_next_rank())
    return None


def compute_per_token_logps_fn(
    model: Any, args: Any, data_iterator: Any, temperature: float = 1.0, no_grad: bool = True,
    enable_routing_replay: bool = False,
) -> Any:  # fmt: skip
    data, replay = swift(TRAINERS).prepare_batch(args, next(data_iterator)), swift(REPLAY)
    helper, routes, all_routes = replay.RouterReplayHelper, None, data.pop("routed_experts", None)
    if enable_routing_replay and helper.is_replay_forward_action(model.config):
        packed = data.get("packed_seq_params")
        routes = replay.get_local_topk_idx_for_current_rank(all_routes, model.config, packed)
        replay.set_router_replay_data(routes, model.config)
    is_training, labels = model.training, data.pop("labels")
    model.eval()
    with torch.no_grad() if no_grad else nullcontext():
        output = swift(UTILS).forward_step_helper(model, data)
    model.train(is_training)
    if enable_routing_replay and helper.is_r2_record_action(model.config):
        routes = replay.get_router_replay_data(model.config)
    return None if output is None or labels is None else per_token_log_probs(output, labels)[0], routes


class RouterReplayHelper(ReplayActions):
    @staticmethod
    def get_micro_batch_router_list(tf_config: Any, vp_rank: Any = None) -> list[Any]:
        from megatron.core.transformer.moe.router_replay import RouterReplay

        return RouterReplay.global_router_replay_instances[: len(_moe_layers_of_stage(tf_config))]


def _moe_layers_of_stage(tf_config: Any) -> list[int]:
    """The numbers of this stage's MoE layers, among all layers of the model."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    first = get_transformer_layer_offset(tf_config, vp_stage=0)
    layers = range(first, first + get_num_layers_to_build(tf_config))
    return [layer for layer in layers if tf_config.moe_layer_freq[layer]]


def get_local_topk_idx_for_current_rank(global_topk_idx: Any, tf_config: Any, packed_seq_params: Any = None) -> Any:
    """Of routes `[1, T, L, K]` those of this rank's MoE layers and tokens."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

    if global_topk_idx is None:
        return None
    routes = global_topk_idx[:, :, _moe_layers_of_stage(tf_config)]
    if parallel_state.get_context_parallel_world_size() > 1:
        routes = split_cp_inputs(routes, packed_seq_params.cu_seqlens_q, 1)
    return scatter_to_sequence_parallel_region(routes.transpose(0, 1)).transpose(0, 1)


def get_router_replay_data(tf_config: Any, vp_rank: Any = None) -> torch.Tensor:
    routers = RouterReplayHelper.get_micro_batch_router_list(tf_config)
    return torch.stack([router.recorded_topk_idx.to(torch.uint8) for router in routers], dim=1)[None]


def set_router_replay_data(layers_topk_idx: Any, tf_config: Any, vp_rank: Any = None) -> None:
    routers = RouterReplayHelper.get_micro_batch_router_list(tf_config)
    for number, router in enumerate(routers):
        router.set_target_indices(layers_topk_idx.flatten(0, 1)[:, number].long())


def apply_router_replay_patch() -> None:
    """Routers may replay an expert twice for a token; then fewer rows are sent than K for each token."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    if hasattr(Dispatcher, "_preprocess_patched"):
        return
    plain = Dispatcher.preprocess

    def preprocess(self: Any, routing_map: torch.Tensor) -> Any:
        result = plain(self, routing_map)
        if self.config.moe_enable_routing_replay:
            self.num_out_tokens = int(routing_map.sum().item())
        return result

    Dispatcher.preprocess, Dispatcher._preprocess_patched = preprocess, True


def offload_megatron_model_to_cpu(models: Sequence[Any]) -> None:
    """The memory of parameters and gradients is freed; views of it stay."""
    for model in models:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            buffer.of_tests = buffer.param_data.clone(), buffer.grad_data.numel()
            for data in (buffer.param_data, buffer.grad_data):
                data.untyped_storage().resize_(0)


def load_megatron_model_to_gpu(models: Sequence[Any], load_grad: bool = True) -> None:
    for model in models:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            kept, count = buffer.of_tests
            buffer.grad_data.untyped_storage().resize_(count * buffer.grad_data.itemsize)
            buffer.grad_data.zero_()
            buffer.param_data.untyped_storage().resize_(kept.numel() * kept.itemsize)
            buffer.param_data.copy_(kept)


def build_routed_experts_batch(
    samples: Sequence[Any], *, seq_lengths: torch.Tensor, max_seq_len: int, template: Any, device: Any,
    router_replay_mode: str, expected_lens: Any,
) -> torch.Tensor:  # fmt: skip
    """Routes of packed samples, 0 for padding; that behind the last sample belongs to it."""
    lengths = seq_lengths[: len(samples)].tolist()
    lengths[-1] = int(seq_lengths[len(samples) - 1 :].sum())
    routes = [each.routed_experts.long() for each in samples]
    pairs = zip(routes, lengths, strict=True)
    return torch.cat([F.pad(each, (0, 0, 0, 0, 0, length - len(each))) for each, length in pairs])[None]


def import_external_file(path: Path) -> None:
    """As `--external_plugins`."""
    sys.path.insert(0, str(path.parent))
    import_module(path.name.split(".", 1)[0])
