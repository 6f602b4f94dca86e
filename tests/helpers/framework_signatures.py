"""Names of frameworks that plugins replace or read, with their signatures, as in the sources at a commit or release."""

from __future__ import annotations

import ast
from pathlib import Path

STORED = {
    "slime": (
        "THUDM/slime 624b824a8",
        """
slime.backends.megatron_utils.model:get_forward_backward_func
slime.backends.megatron_utils.model:train_one_step(args, rollout_id, step_id, data_iterator, model, \
optimizer, opt_param_scheduler, num_microbatches, step_global_batch_size, microbatch_pbar)
slime.backends.megatron_utils.actor:destroy_process_groups
slime.utils.reloadable_process_group:destroy_process_groups()
slime.utils.routing_replay:get_routing_replay_compute_topk(old_compute_topk)
slime.utils.routing_replay:register_routing_replay(module)
slime.utils.routing_replay:ROUTING_REPLAY
slime.utils.routing_replay:RoutingReplay.forward_index
slime.utils.routing_replay:RoutingReplay.backward_index
slime.utils.routing_replay:RoutingReplay.top_indices_list
""",
    ),
    "miles": (
        "radixark/miles 31f1ca961",
        """
miles.backends.megatron_utils.model:get_forward_backward_func
miles.backends.megatron_utils.model:train_one_step(args, rollout_id, step_id, data_iterator, model, \
optimizer, opt_param_scheduler, num_microbatches, num_rollouts, witness_info, attempt, ft_test_action_executor)
miles.backends.megatron_utils.actor:destroy_process_groups
miles.utils.reloadable_process_group:destroy_process_groups()
miles.utils.replay_base:BaseReplayManager.get_topk_fn(self, old_topk_fn, return_probs)
miles.utils.replay_base:BaseReplayManager.register_to_module(self, module, attr_name, stream_idx)
miles.utils.replay_base:BaseReplayManager.get_current(self)
miles.utils.replay_base:BaseReplayManager.stage
miles.utils.replay_base:BaseReplayManager.enabled
miles.utils.replay_base:routing_replay_manager
miles.utils.replay_base:Replay.forward_index
miles.utils.replay_base:Replay.backward_index
miles.utils.replay_base:Replay.top_indices_list
""",
    ),
    "roll": (
        "alibaba/ROLL 8eb27cc2",
        """
roll.distributed.scheduler.decorator:register(dispatch_mode, execute_mode, clear_cache, trace, prefetch, to_remote)
roll.distributed.scheduler.decorator:Dispatch.ONE_TO_ALL
roll.distributed.strategy.megatron_strategy:MegatronInferStrategy.forward_backward_func
roll.distributed.strategy.megatron_strategy:MegatronTrainStrategy.train_step(self, batch, loss_func)
roll.third_party.megatron.router_replay_utils:set_router_replay_data(layers_topk_idx, attention_mask, tf_config, \
vp_rank)
roll.pipeline.rlvr.actor_worker:ActorWorker
roll.pipeline.agentic.agentic_actor_worker:ActorWorker
roll.pipeline.dpo.actor_worker:ActorWorker
roll.pipeline.base_worker:ActorWorker.initialize(self, pipeline_config)
""",
    ),
    "deep_ep": (
        "deepseek-ai/DeepEP dd758ca",
        """
deep_ep.buffers.legacy:Buffer.get_dispatch_layout(self, topk_idx, num_experts, previous_event, async_finish, \
allocate_on_comm_stream)
deep_ep.buffers.legacy:Buffer.dispatch(self, x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, \
is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights, expert_alignment, num_worst_tokens, config, \
previous_event, async_finish, allocate_on_comm_stream)
deep_ep.buffers.legacy:Buffer.combine(self, x, handle, topk_weights, bias, config, previous_event, async_finish, \
allocate_on_comm_stream)
""",
    ),
    "nemo_rl": (
        "NVIDIA-NeMo/RL 7ea279abf",
        """
nemo_rl.models.policy.lm_policy:Policy.__init__(self, cluster, config, tokenizer, name_prefix, workers_per_node, \
init_optimizer, weights_path, optimizer_path, init_reference_model, processor, worker_extension_cls_fqn, \
skip_weight_load)
nemo_rl.distributed.ray_actor_environment_registry:ACTOR_ENVIRONMENT_REGISTRY
nemo_rl.models.megatron.train:get_forward_backward_func
nemo_rl.models.megatron.train:forward_with_post_processing_fn(data_iterator, model, post_processing_fn, \
defer_fp32_logits, global_valid_seqs, global_valid_toks, sampling_params, straggler_timer, draft_model, \
enable_hidden_capture, use_fused_linear_logprobs, use_router_replay, router_replay_train)
nemo_rl.models.megatron.router_replay:build_router_replay_tensors(model, routed_experts)
nemo_rl.models.megatron.data:_shard_routed_experts_for_cp(routed_experts, token_identity, seq_lengths, cu_seqlens, \
cu_seqlens_padded, cp_rank, cp_size)
nemo_rl.models.megatron.data:ProcessedMicrobatch.routed_experts_cp_sharded
nemo_rl.models.megatron.data:ProcessedMicrobatch.packed_seq_params
nemo_rl.models.megatron.data:ProcessedMicrobatch.cu_seqlens_padded
nemo_rl.models.policy.utils:get_runtime_env_for_policy_worker(policy_worker_name)
nemo_rl.models.policy.workers.megatron_policy_worker:MegatronPolicyWorkerImpl.train(self, data, loss_fn, eval_mode, \
gbs, mbs, check_dim_skip_keys)
nemo_rl.models.policy.workers.megatron_policy_worker:MegatronPolicyWorkerImpl.offload_before_refit(self)
""",
    ),
    "ms_swift": (
        "modelscope/ms-swift 4.6.0",
        """
swift.megatron.trainers.base:get_forward_backward_func
swift.megatron.trainers.base:BaseMegatronTrainer.__init__(self, args, template)
swift.megatron.trainers.base:BaseMegatronTrainer.train_step(self, train_data_iterator)
swift.megatron.trainers.rlhf_mixin:MegatronRLHFTrainer.compute_per_token_logps(self, model, data_iterator, no_grad, \
temperature)
swift.megatron.utils.router_replay_utils:get_local_topk_idx_for_current_rank(global_topk_idx, tf_config, \
packed_seq_params, cp_partition_mode)
swift.megatron.utils.router_replay_utils:set_router_replay_data(layers_topk_idx, tf_config, vp_rank)
swift.megatron.utils.utils:get_packed_seq_params(args, position_ids)
""",
    ),
    "skyrl": (
        "NovaSky-AI/SkyRL a9564572e",
        """
skyrl.train.utils.utils:prepare_runtime_environment(cfg)
skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper:get_forward_backward_func
skyrl.backends.skyrl_train.distributed.megatron.token_metadata:build_token_metadata_layout(attention_mask, device, \
packed, fp8_enabled)
skyrl.backends.skyrl_train.utils.replay_utils:setup_per_microbatch_replay_forward(rollout_expert_indices, \
router_padding_mask, attention_mask, model, model_config, metadata_layout, remove_microbatch_padding)
skyrl.backends.skyrl_train.workers.megatron.megatron_worker:PolicyWorker
skyrl.backends.skyrl_train.workers.megatron.megatron_worker:MegatronPolicyWorkerBase.init_model(self, model_path, \
num_training_steps)
skyrl.backends.skyrl_train.workers.megatron.megatron_worker:MegatronPolicyWorkerBase.forward_backward(self, data, \
loss_fn, loss_fn_config, return_per_token_outputs)
skyrl.backends.skyrl_train.workers.megatron.megatron_worker:MegatronPolicyWorkerBase.actor_module
skyrl.backends.skyrl_train.workers.worker:Worker.offload_to_cpu(self, offload_optimizer, offload_model)
""",
    ),
}  # fmt: skip
"""By framework: repository and commit or release, and a name a line."""


def stored(framework: str) -> dict[str, list[str] | None]:
    """Parameters of the stored names; None of what is not a function of its module."""
    found: dict[str, list[str] | None] = {}
    for line in STORED[framework][1].split("\n"):
        name, parenthesis, parameters = line.rstrip(")").partition("(")
        if name:
            found[name] = [each for each in parameters.split(", ") if each] if parenthesis else None
    return found


def parameters_in(folder: str, name: str) -> list[str] | None:
    """Parameters of a name in the sources of a folder; None if it is not a function there.

    Raises:
        LookupError: if it is not there.
    """
    module, _, path = name.partition(":")
    body = ast.parse((Path(folder) / f"{module.replace('.', '/')}.py").read_text()).body
    node: ast.AST | None = None
    for part in path.split("."):
        node = next((each for each in body if part in _names_of(each)), None)
        if node is None and not any(part in _set_in_init(each) for each in body):
            raise LookupError(name)
        body = getattr(node, "body", [])
    if not isinstance(node, ast.FunctionDef):
        return None
    return [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def _names_of(node: ast.AST) -> list[str]:
    """Names that a statement of a module or class defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _set_in_init(node: ast.AST) -> list[str]:
    """Attributes that an `__init__` sets."""
    if not isinstance(node, ast.FunctionDef) or node.name != "__init__":
        return []
    attributes = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return [each.attr for each in attributes if isinstance(each.ctx, ast.Store)]
