"""Names of Megatron-core that are no part of its documented API, and that the other files of this folder use."""

from __future__ import annotations

from trimtab.framework_names import check_names

FITS = "megatron-core 0.16.1 to 0.20"
_MOE = "megatron.core.transformer.moe"
_DISPATCHER = f"{_MOE}.token_dispatcher"
_ALL_TO_ALL = f"{_DISPATCHER}:MoEAlltoAllTokenDispatcher"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
NAMES = (
    f"{_MOE}.moe_layer:MoELayer.router",
    f"{_MOE}.moe_layer:MoELayer.experts",
    f"{_MOE}.moe_layer:MoELayer.token_dispatcher",
    f"{_MOE}.moe_layer:BaseMoELayer.ep_group",
    f"{_MOE}.moe_layer:BaseMoELayer.num_local_experts",
    f"{_MOE}.moe_layer:BaseMoELayer.layer_number",
    f"{_MOE}.moe_utils:get_default_pg_collection()",
    f"{_MOE}.experts:SequentialMLP.local_experts",
    f"{_MOE}.experts:TEGroupedMLP.num_local_experts",
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer",
    # The steps of a dispatcher, and what its first one sets.
    f"{_DISPATCHER}:MoETokenDispatcher.shared_experts",
    f"{_ALL_TO_ALL}.set_shared_experts",
    f"{_ALL_TO_ALL}.dispatch_preprocess",
    f"{_ALL_TO_ALL}.preprocess",
    f"{_ALL_TO_ALL}.num_out_tokens",
    f"{_ALL_TO_ALL}.input_splits",
    f"{_ALL_TO_ALL}.output_splits",
    f"{_ALL_TO_ALL}.num_global_tokens_per_local_expert",
    f"{_ALL_TO_ALL}.token_dispatch",
    f"{_ALL_TO_ALL}.dispatch_postprocess",
    f"{_ALL_TO_ALL}.combine_preprocess",
    f"{_ALL_TO_ALL}.token_combine",
    f"{_ALL_TO_ALL}.combine_postprocess",
    f"{_DISPATCHER}:MoEFlexTokenDispatcher._comm_manager",
    f"{_DISPATCHER}:get_align_size_for_quantization(config)",
    f"{_DISPATCHER}:_DeepepManager.setup_metadata(routing_map, probs)",
    f"{_DISPATCHER}:_DeepepManager._indices_to_multihot(indices, probs)",
    f"{_MOE}.fused_a2a:get_buffer(group, hidden_bytes)",
    f"{_MOE}.fused_a2a:get_hidden_bytes(x)",
    f"{_DISPATCHER}:_HybridEPManager.setup_metadata(routing_map, probs)",
    # Gradients and parameters of experts, and what optimizers keep of them.
    "megatron.core.distributed:DistributedDataParallel.expert_parallel_bucket_groups",
    f"{_BUCKETS}.start_grad_sync(force_all_reduce)",
    f"{_BUCKETS}.start_param_sync(force_sync)",
    f"{_BUCKETS}.reset()",
    f"{_OPTIMIZER}.model_param_gbuf_map",
    f"{_OPTIMIZER}._get_model_param_range_map(param)",
    f"{_OPTIMIZER}._get_main_param_and_optimizer_states(model_param)",
)


def check_megatron() -> None:
    """Raise InputError with the first name that this Megatron does not have, and the number of others."""
    check_names(NAMES, fits=FITS)
