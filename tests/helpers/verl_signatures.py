"""Names of verl that its plugin uses, with their parameters, as in the wheel 0.9.1, and modules with just these."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"
REPLAY = "verl.utils.megatron.router_replay_utils"
STORED = f"""
verl.workers.engine:EngineRegistry.register(model_type, backend, device, vendor)
verl.workers.engine.megatron.transformer_impl:get_forward_backward_func
{ENGINE}.__init__(self, model_config, engine_config, optimizer_config, checkpoint_config)
{ENGINE}._build_optimizer(self)
{ENGINE}.forward_backward_batch(self, data, loss_function, forward_only)
{ENGINE}.is_mp_src_rank_with_outputs(self)
{ENGINE}.is_optimizer_offload_enabled
{ENGINE}.train_mode(self, kwargs)
{ENGINE}.get_per_tensor_param(self, base_sync_done, kwargs)
{ENGINE}.get_per_tensor_param_shard(self, kwargs)
{ENGINE}.save_checkpoint(self, local_path, hdfs_path, global_step, max_ckpt_to_keep, kwargs)
{ENGINE}.load_checkpoint(self, local_path, hdfs_path, del_local_after_load, kwargs)
{REPLAY}:align_r3_router_replay_data(layers_topk_idx, input_ids)
{REPLAY}:build_r3_replay_mask(input_ids, response_mask)
{REPLAY}:iter_model_routers(model)
{REPLAY}:set_router_replay_data(layers_topk_idx, attention_mask, tf_config, vp_rank, replay_mask, local_cp_size, model)
verl.utils.megatron.router_replay_patch:RouterReplay.set_target_indices(self, topk_indices, replay_mask)
verl.utils.megatron.router_replay_patch:RouterReplay.target_topk_idx
verl.utils.megatron.router_replay_patch:RouterReplay.target_replay_mask
verl.utils.megatron.router_replay_patch:RouterReplay.clear_indices(self)
verl.utils.megatron.router_replay_patch:RouterReplay.router_replay_action
verl.utils.megatron.router_replay_patch:RouterReplayAction.REPLAY_FORWARD
verl.utils.megatron_utils:unwrap_model(model, module_instances)
verl.utils.device:get_device_name()
""".split("\n")[1:-1]


def parts_of(line: str) -> tuple[str, str, list[str] | None]:
    """Module, name in it, and parameters of a line; None for what is not called."""
    name, parenthesis, parameters = line.removesuffix(")").partition("(")
    module, _, path = name.partition(":")
    return module, path, list(filter(None, parameters.split(", "))) if parenthesis else None


def stand_ins(lines: list[str]) -> dict[str, ModuleType]:
    """Modules that have the names of these lines, for `sys.modules`. Functions do nothing; `register` decorates."""
    modules: dict[str, ModuleType] = {}
    for module_name, path, parameters in map(parts_of, lines):
        *packages, _ = module_name.split(".")
        for count in range(1, len(packages) + 2):
            name = ".".join(module_name.split(".")[:count])
            modules.setdefault(name, ModuleType(name))
        owner: Any = modules[module_name]
        *classes, last = path.split(".")
        for each in classes:
            if not hasattr(owner, each):
                setattr(owner, each, type(each, (), {}))
            owner = getattr(owner, each)
        setattr(owner, last, None if parameters is None else _function(parameters))
    return modules


def _function(parameters: list[str]) -> Callable[..., Any]:
    def call(*_args: Any, **_kwargs: Any) -> Any:
        return lambda decorated: decorated

    kinds = {"self": inspect.Parameter.POSITIONAL_ONLY}
    vars(call)["__signature__"] = inspect.Signature(
        [inspect.Parameter(name, kinds.get(name, inspect.Parameter.KEYWORD_ONLY)) for name in parameters]
    )
    return call
