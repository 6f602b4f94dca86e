"""Options of Megatron-core by name: those that are refused, and those that no run has reached. Needs no Megatron.

The names are those of TransformerConfig, DistributedDataParallelConfig and OptimizerConfig; they mean the same in all
of them. Names that only newer versions have are among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple


class Option(NamedTuple):
    """An option and its values that are supported.

    Attributes:
        name: of the option.
        supported: its values that are supported.
        reason: why others are not.
        remedy: what to do.
    """

    name: str
    supported: tuple[Any, ...]
    reason: str
    remedy: str


OFF = (None, False)
_FP8 = "replicas and their gradients are made in the dtype of the weights, without scales"
_PADDED = "rows are planned without padding"
_DROPS = "every recorded row is computed, none is dropped"
_WGRAD = "gradients of experts have to be complete in the layer's backward, when those of replicas are added"
_ONE_TENSOR = "weights of experts are read as one Parameter for each expert"
_FSDP = "home experts have to be whole Parameters on their rank"

REFUSED = (
    # Parallelism.
    Option(
        "expert_tensor_parallel_size", (None, 1), "a replica is a whole expert on one rank", "set it to 1 and raise EP"
    ),
    Option("expert_tensor_parallel_num_weight_shards", (None, 1), "a replica is a whole expert", "set it to 1"),
    Option("expert_gtp_weight_remat_size", (None, 1), "a replica is a whole expert", "set it to 1"),
    Option("hybrid_context_parallel", OFF, "its schedule runs a micro-batch in parts", "use plain context parallelism"),
    # Router.
    Option("moe_router_fusion", OFF, "a fused router can't replay recorded routing", "switch it off"),
    Option("moe_router_force_load_balancing", OFF, "it replaces the router's logits by random ones", "switch it off"),
    Option("moe_router_force_biased", (None, 0, 0.0), "it adds random numbers to the router's logits", "leave it out"),
    Option("moe_expert_capacity_factor", (None,), _DROPS, "train without dropping tokens"),
    Option("moe_token_dropping", OFF, _DROPS, "train without dropping tokens"),
    Option("moe_pad_expert_input_to_capacity", OFF, _PADDED, "switch it off"),
    Option("moe_router_padding_for_quantization", OFF, _PADDED, "switch it off"),
    Option("moe_router_padding_for_fp8", OFF, _PADDED, "switch it off"),
    Option("moe_expert_rank_capacity_factor", OFF, "rows that exceed its buffers are dropped", "leave it out"),
    Option("moe_use_grouped_tensor", OFF, _PADDED, "switch it off"),
    # Dispatcher.
    Option(
        "moe_token_dispatcher_type", (None, "alltoall", "flex"),
        "only these dispatchers have been built for home experts and replicas",
        "set it to alltoall or flex",
    ),
    Option(
        "moe_flex_dispatcher_backend", (None, "deepep", "hybridep"),
        "only these backends have been built for home experts and replicas",
        "set it to deepep or hybridep",
    ),
    Option(
        "overlap_moe_expert_parallel_comm", OFF, "layers of two micro-batches run at the same time", "switch it off"
    ),
    Option("moe_dispatch_fwd_dtype", (None, "bf16"), "rows are sent in their own dtype", "leave it at bf16"),
    Option("moe_combine_bwd_dtype", (None, "bf16"), "rows are sent in their own dtype", "leave it at bf16"),
    # Experts.
    Option("fp8", OFF, _FP8, "train in bfloat16"),
    Option("fp4", OFF, _FP8, "train in bfloat16"),
    Option("fp8_param", OFF, _FP8, "keep parameters in bfloat16"),
    Option("fp4_param", OFF, _FP8, "keep parameters in bfloat16"),
    Option("fp8_param_gather", OFF, _FP8, "gather parameters in bfloat16"),
    Option("fp4_param_gather", OFF, _FP8, "gather parameters in bfloat16"),
    Option("reuse_grad_buf_for_mxfp8_param_ag", OFF, _FP8, "gather parameters in bfloat16"),
    Option("quant_recipe", (None,), _FP8, "train without a quantization recipe"),
    Option("use_kitchen", OFF, _FP8, "train without Kitchen"),
    Option("moe_use_legacy_grouped_gemm", OFF, _ONE_TENSOR, "use TEGroupedMLP or SequentialMLP"),
    Option("moe_single_grouped_weight", OFF, _ONE_TENSOR, "switch it off"),
    Option("moe_single_grouped_bias", OFF, _ONE_TENSOR, "switch it off"),
    Option("use_transformer_engine_op_fuser", OFF, "fused operations keep their own weights", "switch it off"),
    Option(
        "moe_apply_probs_on_input", OFF, "replicas apply the router's weights behind the activation", "switch it off"
    ),
    Option(
        "transformer_impl", (None, "local", "transformer_engine"),
        "its MoE layers replace their dispatcher in every forward", "set it to transformer_engine",
    ),
    Option(
        "batch_invariant_mode", OFF, "sums over a token's experts follow the order of ranks, which replicas change",
        "switch it off",
    ),
    Option("mlp_chunks_for_training", (None, 1), "a layer would run several times for a micro-batch", "set it to 1"),
    # Gradients and optimizer.
    Option("delay_wgrad_compute", OFF, _WGRAD, "switch it off"),
    Option("overlap_dispatch_backward_with_experts_wgrad", OFF, _WGRAD, "switch it off"),
    Option("use_megatron_fsdp", OFF, _FSDP, "use Megatron's DistributedDataParallel"),
    Option("use_custom_fsdp", OFF, _FSDP, "use Megatron's DistributedDataParallel"),
    Option("use_torch_fsdp2", OFF, _FSDP, "use Megatron's DistributedDataParallel"),
    Option(
        "num_distributed_optimizer_instances", (None, 1),
        "its expert-data-parallel groups are parts of those that hold the same experts", "set it to 1",
    ),
    Option(
        "overlap_param_gather_with_optimizer_step", OFF,
        "the first bucket of parameters is still gathered when replicas are copied", "switch it off",
    ),
    # Memory.
    Option("moe_paged_stash", OFF, "activations of replicas are not stashed", "switch it off"),
)  # fmt: skip
"""Options whose other values are refused. Some need more than their name: see `refusals`."""

NEVER_RUN = (
    Option("transformer_impl", (None, "local", "inference_optimized"), "it needs a GPU", ""),
    Option("moe_grouped_gemm", OFF, "grouped experts of Transformer Engine need a GPU", ""),
    Option("moe_permute_fusion", OFF, "the fused permutation needs a GPU", ""),
    Option("gradient_accumulation_fusion", OFF, "fused gradients need a GPU", ""),
    Option("fp16", OFF, "loss scaling needs a GPU", ""),
    Option("tp_comm_overlap", OFF, "it needs Transformer Engine", ""),
    Option("optimizer_cpu_offload", OFF, "it needs a GPU", ""),
    Option("use_precision_aware_optimizer", OFF, "it needs Transformer Engine", ""),
    Option("nccl_ub", OFF, "it needs NCCL", ""),
    Option("cpu_offloading", OFF, "it needs Transformer Engine", ""),
    Option("fine_grained_activation_offloading", OFF, "it needs a GPU", ""),
    Option("enable_autocast", OFF, "it needs a GPU", ""),
    Option("moe_latent_size", (None,), "its projections need Transformer Engine", ""),
    Option("enable_mhc_connections", OFF, "no test has it", ""),
)
"""Options whose other values are allowed and have never run with Trimtab, with the reason."""

IMMOVABLE = (
    Option("optimizer_cpu_offload", OFF, "the state of experts is on the host", "switch it off"),
    Option("use_precision_aware_optimizer", OFF, "the state of experts is scaled", "switch it off"),
)
"""Options whose other values keep the ids of experts in a run."""

_OFFLOADS_OF_EXPERTS = {"expert_fc1", "moe_act", "fused_group_mlp"}
_GRAPH_MODULES_OUTSIDE = {"attn", "mlp", "mamba"}


def names() -> set[str]:
    """All names that `refusals` and `never_run` read."""
    joint = {
        "tensor_model_parallel_size", "enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "cuda_graph_scope",
        "cuda_graph_modules", "moe_router_load_balancing_type", "optimizer", "offload_modules",
    }  # fmt: skip
    return joint | {option.name for option in (*REFUSED, *NEVER_RUN)}


def options_of(config: Any) -> dict[str, Any]:
    """The options that `refusals` and `never_run` read, of a config or arguments that have some of them."""
    return {name: getattr(config, name) for name in sorted(names()) if hasattr(config, name)}


def refusals(values: Mapping[str, Any]) -> dict[str, str]:
    """Why options can't be balanced, one line each, by name.

    Args:
        values: the options that are known; others have a value that is supported.
    """
    found = {}
    for option in REFUSED:
        value = values.get(option.name)
        if value not in option.supported and not (option.name in _MAY_BE_NEGATIVE and _is_negative(value)):
            found[option.name] = _line(option.name, value, option.reason, option.remedy)
    for problem in (_expert_tensor, _cuda_graphs, _own_topk, _offloading):
        found |= problem(values)
    return found


def never_run(values: Mapping[str, Any]) -> dict[str, str]:
    """Which options are allowed but have never run with Trimtab, one line each, by name."""
    found = {
        option.name: f"{option.name}={_text(value)} has never run with Trimtab: {option.reason}"
        for option in NEVER_RUN
        if (value := values.get(option.name)) not in option.supported
    }
    if values.get("moe_token_dispatcher_type") == "flex":
        name = "moe_token_dispatcher_type"
        found[name] = f"{name}=flex has never run with Trimtab: DeepEP and HybridEP need GPUs"
    optimizer = values.get("optimizer")
    if isinstance(optimizer, str) and optimizer not in ("adam", "sgd"):
        found["optimizer"] = f"optimizer={optimizer} has never run with Trimtab: only adam and sgd have"
    if "global_aux_loss" in _as_list(values.get("moe_router_load_balancing_type")):
        found["moe_router_load_balancing_type"] = "global_aux_loss has never run with Trimtab: no test has it"
    if _graph_impl(values)[1] and "cuda_graph_impl" not in refusals(values):
        found["cuda_graph_impl"] = "CUDA graphs outside of MoE layers have never run with Trimtab: they need a GPU"
    return found


def immovable(values: Mapping[str, Any]) -> dict[str, str]:
    """Which options keep the ids of experts in a run, one line each, by name."""
    return {
        option.name: f"{option.name}={_text(value)}: {option.reason}; {option.remedy}"
        for option in IMMOVABLE
        if (value := values.get(option.name)) not in option.supported
    }


_MAY_BE_NEGATIVE = ("moe_expert_capacity_factor",)  # A negative factor is none.


def _is_negative(value: Any) -> bool:
    return isinstance(value, int | float) and value < 0


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(each) for each in value)}]"
    return str(value)


def _line(name: str, value: Any, reason: str, remedy: str) -> str:
    return f"{name}={_text(value)} is not supported: {reason}; {remedy}"


def _as_list(value: Any) -> list[str]:
    """The words of an option with one or several, which may be members of an Enum."""
    if value is None:
        return []
    several: Iterable[Any] = value.split(",") if isinstance(value, str) else value
    if isinstance(value, Enum):
        several = [value]
    return [_text(each).strip() for each in several]


def _expert_tensor(values: Mapping[str, Any]) -> dict[str, str]:
    name = "expert_tensor_parallel_size"
    tensor = values.get("tensor_model_parallel_size")
    if name in values and values[name] is None and tensor not in (None, 1):
        reason = f"it then is tensor_model_parallel_size, {tensor}, and a replica is a whole expert on one rank"
        return {name: _line(name, None, reason, "set it to 1")}
    return {}


def _graph_impl(values: Mapping[str, Any]) -> tuple[str, Any]:
    """The option that switches CUDA graphs on, and its value; None if they are off."""
    for name in ("enable_cuda_graph", "external_cuda_graph"):
        if values.get(name):
            return name, values[name]
    impl = values.get("cuda_graph_impl")
    return "cuda_graph_impl", None if impl in (None, False, "none") else impl


def _cuda_graphs(values: Mapping[str, Any]) -> dict[str, str]:
    name, impl = _graph_impl(values)
    if not impl:
        return {}
    modules = _as_list(values.get("cuda_graph_modules")) or _as_list(values.get("cuda_graph_scope"))
    if impl != "full_iteration" and modules and _GRAPH_MODULES_OUTSIDE.issuperset(modules):
        return {}
    scope = _text(modules) if modules else "the whole layer"
    reason = f"its scope, {scope}, includes MoE layers, whose calls differ between micro-batches"
    return {"cuda_graph_impl": _line(name, impl, reason, "set cuda_graph_scope to attn, or cuda_graph_impl to none")}


def _offloading(values: Mapping[str, Any]) -> dict[str, str]:
    name = "offload_modules"
    modules = _as_list(values.get(name))
    if values.get("fine_grained_activation_offloading") and not _OFFLOADS_OF_EXPERTS.isdisjoint(modules):
        return {
            name: _line(name, modules, "it counts the products of experts, and replicas add some", "leave them out")
        }
    return {}


def _own_topk(values: Mapping[str, Any]) -> dict[str, str]:
    name = "moe_router_load_balancing_type"
    kinds = _as_list(values.get(name))
    if not {"sinkhorn", "quantile_balancing"}.isdisjoint(kinds):
        return {name: _line(name, kinds, "its router can't replay recorded routing", "use none or aux_loss")}
    return {}
