"""Options of a newer Megatron that Trimtab has no knowledge of. Needs no Megatron."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from trimtab.integrations.megatron.option_tables import IMMOVABLE, names

_WATCHED = re.compile(r"moe|expert|router|dispatch|fp8|fp4|quant|optim|grad|param|bucket")
# Read only with an option that is refused, or by inference, optimizers, recompute or a log.
_HARMLESS = re.compile(
    r"fp8_|fp4_|inference_|moe_paged_stash_|(megatron_)?fsdp_|mtp_|muon_|adaptive_muon_|adam_|overlap_cpu_optimizer|"
    r"pin_cpu_|optimizer_offload_|(main_(param|grad)s|params|exp_avg|exp_avg_sq)_dtype|check_for_|pipeline_|tensor_"
)
_KNOWN = """
apply_wd_to_qk_layernorm average_in_collective align_param_gather bucket_size calculate_per_token_loss
data_parallel_sharding_strategy defer_embedding_wgrad_compute disable_symmetric_registration
expert_model_parallel_size finalize_model_grads_func grad_norm_skip_threshold grad_reduce_in_fp32 grad_scale_func
grad_sync_func gradient_reduce_div_fusion keep_fp8_transpose_cache log_num_zeros_in_grad moe_aux_loss_coeff
moe_deepep_num_sms moe_enable_deepep moe_enable_routing_replay moe_extended_tp moe_ffn_hidden_size
moe_flex_dispatcher_num_sms moe_grad_scale_func moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing moe_input_jitter_eps moe_layer_freq
moe_layer_recompute moe_mlp_glu_interleave_size moe_pad_experts_for_cuda_graph_inference moe_per_layer_logging
moe_router_bias_update_rate moe_router_dtype moe_router_enable_expert_bias moe_router_group_topk moe_router_num_groups
moe_router_pre_softmax moe_router_score_function moe_router_topk moe_router_topk_limited_devices
moe_router_topk_scaling_factor moe_shared_expert_gate moe_shared_expert_glu_interleave_size
moe_shared_expert_intermediate_size moe_shared_expert_overlap moe_token_drop_policy moe_z_loss_coeff num_moe_experts
num_buckets outer_dp_sharding_strategy overlap_grad_reduce overlap_param_gather pad_buckets_for_high_nccl_busbw
param_sync_func perform_initialization reduce_scatter_with_fp32_accumulation store_param_remainders
suggested_communication_unit_size tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap_rs_dgrad
use_distributed_optimizer use_layer_wise_distributed_optimizer use_torch_optimizer_for_cpu_offload
wgrad_deferral_limit
"""
"""Others of Megatron-core 0.16.1 to 0.20 that do not concern replicas or are tested with them."""


def unknown_options(config: Any) -> Iterator[str]:
    """Yields `name=value` of options that may matter to experts, are not at their default, and are not known here.

    Args:
        config: a TransformerConfig, DistributedDataParallelConfig or OptimizerConfig; others have none.
    """
    known = {*_KNOWN.split(), *names(), *(option.name for option in IMMOVABLE)}
    for field in fields(config) if hasattr(config, "__dataclass_fields__") else ():
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(config, field.name, default)
        if field.name in known or not _WATCHED.search(field.name) or _HARMLESS.match(field.name):
            continue
        if not callable(value) and value != default:
            yield f"{field.name}={value}"
