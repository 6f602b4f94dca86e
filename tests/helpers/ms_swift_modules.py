"""ms-swift's modules, made of `ms_swift_stand_in`; with MS_SWIFT=folder of ms-swift's source, with its own functions.

Its own are router_replay_utils and what `OWN` and `OWN_METHODS` name.
"""

from __future__ import annotations

import ast
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from helpers import ms_swift_stand_in as stand_in
from helpers.ms_swift_stand_in import BASE, GRPO, REPLAY, RL_UTILS, TRAINERS, UTILS, swift
from helpers.own_source import own_functions, path_in, run_statements

LM_UTILS, TORCH_UTILS = f"{UTILS}.megatron_lm_utils", "swift.utils.transformers_utils"
OWN = {
    f"{UTILS}.utils": ("get_packed_seq_params", "forward_step_helper"),
    LM_UTILS: ("get_batch_on_this_cp_rank",),
    TORCH_UTILS: ("get_packed_seq_params",),
    TRAINERS: (
        "get_batch_on_this_pp_rank", "prepare_batch", "compute_per_token_logps_fn", "offload_megatron_model_to_cpu",
        "load_megatron_model_to_gpu",
    ),
    RL_UTILS: ("_normalize_routed_experts_tensor", "_pad_or_trim_routed_experts", "build_routed_experts_batch"),
}  # fmt: skip
OWN_METHODS = {
    (BASE, "BaseMegatronTrainer"): ("train_step",),
    (GRPO, "MegatronGRPOTrainer"): ("forward_step", "_maybe_compute_logps"),
}
_REPLAY_NAMES = (
    "get_local_topk_idx_for_current_rank", "set_router_replay_data", "get_router_replay_data",
    "apply_router_replay_patch", "RouterReplayHelper",
)  # fmt: skip


@contextmanager
def ms_swift() -> Iterator[None]:
    """ms-swift can be imported. What it and Trimtab replace of it, and in Megatron, is given back."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    dispatcher: Any = MoEAlltoAllTokenDispatcher
    trainer: Any = stand_in.BaseMegatronTrainer
    preprocess, path, folder = dispatcher.preprocess, list(sys.path), os.environ.get("MS_SWIFT", "")
    names = _names()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(trainer, "__init__", trainer.__init__))
        for name, values in names.items():
            module = ModuleType(name)
            if any(other.startswith(f"{name}.") for other in names):
                module.__path__ = []
            vars(module).update(values)
            sys.modules[name] = module
            stack.callback(sys.modules.pop, name)
        if folder:
            _use_source(stack, Path(folder))
        try:
            yield
        finally:
            sys.path[:] = path
            sys.modules.pop("trimtab_ms_swift", None)
            dispatcher.preprocess = preprocess
            if hasattr(dispatcher, "_preprocess_patched"):
                del dispatcher._preprocess_patched


def _names() -> dict[str, dict[str, Any]]:
    """What each module has."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def of(*names: str) -> dict[str, Any]:
        return {name: getattr(stand_in, name) for name in names}

    utils = ("get_packed_seq_params", "forward_step_helper", "get_batch_on_this_cp_rank")
    packages = ("swift", "swift.megatron", "swift.megatron.trainers", "swift.rlhf_trainers")
    return {name: {} for name in packages} | {
        "mcore_bridge": of("split_cp_inputs"),
        "swift.utils": {"get_logger": mock.Mock, "get_current_device": lambda: "cpu"},
        "swift.utils.torch_utils": {"get_current_device": lambda: "cpu"},
        TORCH_UTILS: {},
        RL_UTILS: of("build_routed_experts_batch"),
        UTILS: of(*_REPLAY_NAMES, *utils),
        f"{UTILS}.utils": of(*utils),
        LM_UTILS: of("get_batch_on_this_cp_rank"),
        REPLAY: of(*_REPLAY_NAMES),
        "swift.megatron.trainers.vocab_parallel_utils": {
            "compute_logps_and_entropy_from_logits": stand_in.per_token_log_probs
        },
        TRAINERS: of(
            "prepare_batch", "compute_per_token_logps_fn", "offload_megatron_model_to_cpu", "load_megatron_model_to_gpu"
        ),
        BASE: of("BaseMegatronTrainer") | {"get_forward_backward_func": get_forward_backward_func},
        "swift.megatron.trainers.rlhf_mixin": of("MegatronRLHFTrainer"),
        GRPO: of("MegatronGRPOTrainer"),
    }


def _use_source(stack: ExitStack, folder: Path) -> None:
    """ms-swift's own functions, in namespaces of what they use."""

    def take(module: str, wanted: tuple[str, ...], class_name: str = "") -> None:
        own_functions(path_in(folder, module), wanted, vars(swift(module)), class_name)

    source = path_in(folder, REPLAY).read_text()
    run_statements(ast.parse(source).body, "ms-swift's own replay", vars(swift(REPLAY)))
    replay = {name: getattr(swift(REPLAY), name) for name in _REPLAY_NAMES}
    used = _used() | replay
    vars(swift(UTILS)).update(replay)
    for name, wanted in OWN.items():
        vars(swift(name)).update(used)
        take(name, wanted)
    swift(f"{UTILS}.utils")._get_packed_seq_params = swift(TORCH_UTILS).get_packed_seq_params
    for name in (f"{UTILS}.utils", LM_UTILS):
        own = {each: getattr(swift(name), each) for each in OWN[name]}
        vars(swift(UTILS)).update(own)
        vars(swift(TRAINERS)).update(own)
    for (name, class_name), methods in OWN_METHODS.items():
        vars(swift(name)).update(used)
        take(name, methods, class_name)
        for method in methods:
            stack.enter_context(mock.patch.object(getattr(stand_in, class_name), method, getattr(swift(name), method)))


def _used() -> dict[str, Any]:
    """What ms-swift's functions use."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.inference.communication_utils import recv_from_prev_pipeline_rank_, send_to_next_pipeline_rank
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    return {
        "torch": torch, "gc": gc, "partial": partial, "nullcontext": nullcontext, "deepcopy": deepcopy,
        "mpu": parallel_state, "DDP": DistributedDataParallel, "PackedSeqParams": PackedSeqParams,
        "RouterReplay": RouterReplay, "RouterReplayAction": RouterReplayAction,
        "recv_from_prev_pipeline_rank_": recv_from_prev_pipeline_rank_,
        "send_to_next_pipeline_rank": send_to_next_pipeline_rank,
        "empty_cache": lambda: None, "get_current_device": lambda: "cpu", "is_torch_npu_available": lambda: False,
        "to_device": lambda data, device, non_blocking: dict(data), "split_cp_inputs": stand_in.split_cp_inputs,
        "_should_use_npu_generated_attention_mask": lambda args: False,
        "should_compute_local_teacher_logps": lambda **_: False,
        "compute_logps_and_entropy_from_logits": stand_in.per_token_log_probs,
        # Log-probabilities stay as they are.
        "reconstruct_tensor_cp": lambda size, tensor, *_: tensor,
        "pad_logps_back_to_batch": lambda *, logps_rmpad, **_: (logps_rmpad, None),
        "logical_and_across_model_parallel_group": bool,
        "reduce_max_stat_across_model_parallel_group": lambda norm: norm,
    }  # fmt: skip
