"""What of a Megatron configuration is refused, by name; a supported one has no problem."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.rank_pool import RankPool
from trimtab.errors import InputError
from trimtab.integrations.megatron.option_tables import NEVER_RUN, REFUSED, names, never_run, refusals

# For every refused option a value with which Megatron runs.
VALUES: dict[str, Any] = {
    "expert_tensor_parallel_size": 2,
    "expert_tensor_parallel_num_weight_shards": 2,
    "expert_gtp_weight_remat_size": 2,
    "hybrid_context_parallel": True,
    "moe_router_fusion": True,
    "moe_router_force_load_balancing": True,
    "moe_router_force_biased": 0.1,
    "moe_expert_capacity_factor": 1.25,
    "moe_expert_rank_capacity_factor": 1.0,
    "moe_token_dropping": True,
    "moe_pad_expert_input_to_capacity": True,
    "moe_router_padding_for_quantization": True,
    "moe_router_padding_for_fp8": True,
    "moe_token_dispatcher_type": "allgather",
    "moe_flex_dispatcher_backend": "ncclep",
    "moe_shared_expert_overlap": True,
    "overlap_moe_expert_parallel_comm": True,
    "moe_dispatch_fwd_dtype": "mxfp8",
    "moe_combine_bwd_dtype": "mxfp8",
    "fp8": "hybrid",
    "fp4": "e2m1",
    "fp8_param": True,
    "fp4_param": True,
    "fp8_param_gather": True,
    "fp4_param_gather": True,
    "reuse_grad_buf_for_mxfp8_param_ag": True,
    "activation_func_fp8_input_store": True,
    "quant_recipe": object(),
    "use_kitchen": True,
    "moe_use_legacy_grouped_gemm": True,
    "moe_single_grouped_weight": True,
    "moe_single_grouped_bias": True,
    "moe_use_grouped_tensor": True,
    "use_transformer_engine_op_fuser": True,
    "moe_mlp_glu_interleave_size": 32,
    "moe_apply_probs_on_input": True,
    "moe_latent_size": 8,
    "mtp_num_layers": 1,
    "mlp_chunks_for_training": 2,
    "use_inference_optimized_layers": True,
    "is_hybrid_model": True,
    "heterogeneous_block_specs": True,
    "enable_mhc_connections": True,
    "delay_wgrad_compute": True,
    "overlap_dispatch_backward_with_experts_wgrad": True,
    "use_megatron_fsdp": True,
    "use_custom_fsdp": True,
    "use_torch_fsdp2": True,
    "data_parallel_sharding_strategy": "optim_grads",
    "num_distributed_optimizer_instances": 2,
    "overlap_param_gather_with_optimizer_step": True,
    "cpu_offloading": True,
    "fine_grained_activation_offloading": True,
    "moe_paged_stash": True,
    "num_microbatches_with_partial_activation_checkpoints": 1,
    "enable_autocast": True,
}  # fmt: skip
JOINT: list[tuple[str, dict[str, Any]]] = [
    ("expert_tensor_parallel_size", {"expert_tensor_parallel_size": None, "tensor_model_parallel_size": 2}),
    ("enable_cuda_graph", {"enable_cuda_graph": True}),
    ("external_cuda_graph", {"external_cuda_graph": True}),
    ("cuda_graph_impl", {"cuda_graph_impl": "local", "cuda_graph_scope": []}),
    ("cuda_graph_impl", {"cuda_graph_impl": "local", "cuda_graph_scope": "full"}),
    ("cuda_graph_impl", {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}),
    ("cuda_graph_impl", {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": ["attn"]}),
    ("cuda_graph_impl", {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,moe_router"}),
    ("cuda_graph_impl", {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "moe_preprocess"]}),
    ("moe_router_load_balancing_type", {"moe_router_load_balancing_type": "sinkhorn"}),
]
SUPPORTED: list[dict[str, Any]] = [
    {},
    {"expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"moe_expert_capacity_factor": -1.0},
    {"cuda_graph_impl": "none", "cuda_graph_scope": []},
    {"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]},
    {"recompute_modules": ["moe_act", "layernorm"]},
    {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
    {"mtp_num_layers": 0},
    {"an_option_of_later": "years"},
]
# Options of Megatron-core later than 0.16.1, of its scripts, and of earlier versions.
ELSEWHERE = {
    "expert_tensor_parallel_num_weight_shards", "expert_gtp_weight_remat_size", "moe_router_force_biased",
    "moe_expert_rank_capacity_factor", "moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype", "fp4_param_gather",
    "moe_single_grouped_weight", "moe_single_grouped_bias", "moe_use_grouped_tensor", "moe_mlp_glu_interleave_size",
    "use_transformer_engine_op_fuser", "mlp_chunks_for_training", "enable_mhc_connections", "moe_paged_stash",
    "overlap_dispatch_backward_with_experts_wgrad", "use_torch_fsdp2", "cuda_graph_modules",
}  # fmt: skip


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    pool = RankPool(1)
    yield pool
    pool.close()


def model_of(state: dict[str, Any]) -> Any:
    """A GPTModel with two MoE layers in DistributedDataParallel, and its layers."""
    if "model" not in state:
        from helpers.megatron_runs import Layout, MegatronCase, Model
        from trimtab.integrations.megatron.on_cpu import use_cpu

        use_cpu()
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel()
        model = Model(Layout(1, 1), MegatronCase())
        state["model"] = model.config, list(model.moe_layers()), model.chunks
    return state["model"]


def problems(state: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """Problems of the small model with other values of its options, on the wrapper if it has them."""
    from trimtab.integrations.megatron.support import problems_of

    config, layers, chunks = model_of(state)
    of_wrapper = {name for name in options if hasattr(chunks[0].ddp_config, name)} - {"delay_wgrad_compute"}
    changed, wrapper = copy.copy(config), copy.copy(chunks[0])
    wrapper.ddp_config = copy.copy(wrapper.ddp_config)
    for name, value in options.items():
        target = wrapper.ddp_config if name in of_wrapper else wrapper if hasattr(wrapper, name) else changed
        setattr(target, name, value)
    return problems_of(changed, layers, [wrapper])


def test_every_refused_option_has_a_value_here() -> None:
    assert [option.name for option in REFUSED] == list(VALUES)


@pytest.mark.parametrize(("name", "options"), [*((name, {name: value}) for name, value in VALUES.items()), *JOINT])
def test_refused_options_are_named(one_rank: RankPool, name: str, options: dict[str, Any]) -> None:
    (found,) = one_rank.call(problems, options if name != "quant_recipe" else {name: "recipe"})
    assert len(found) == 1
    assert found[0].startswith(f"{name}=")
    assert " is not supported: " in found[0]
    assert found[0].count("; ") == 1


@pytest.mark.parametrize("options", SUPPORTED)
def test_supported_options_have_no_problem(one_rank: RankPool, options: dict[str, Any]) -> None:
    assert one_rank.call(problems, options) == [[]]


def refuse_real_models(state: dict[str, Any]) -> dict[str, str]:
    """The messages of `balance` for models that can't be balanced, and for one that can."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
    from torch import nn

    from trimtab.integrations.megatron import balance

    config, layers, chunks = model_of(state)
    layer = layers[0]
    messages = {}

    def refused(what: str, model: Any = chunks) -> None:
        with pytest.raises(InputError) as error:
            balance(model)
        messages[what] = str(error.value)

    dispatcher = layer.token_dispatcher
    layer.token_dispatcher = MoEAllGatherTokenDispatcher.__new__(MoEAllGatherTokenDispatcher)
    refused("dispatcher")
    layer.token_dispatcher = dispatcher
    router, layer.router = layer.router, nn.Identity()
    refused("router")
    layer.router = router
    layer.__class__ = type("LatentMoELayer", (MoELayer,), {})
    refused("layer")
    layer.__class__ = MoELayer
    experts, layer.experts = layer.experts, nn.Identity()
    refused("experts")
    layer.experts = experts
    config.fp8, config.moe_latent_size, chunks[0].ddp_config.delay_wgrad_compute = "e4m3", 8, True
    refused("three")
    config.fp8 = config.moe_latent_size = None
    refused("wrapper")
    chunks[0].ddp_config.delay_wgrad_compute = False
    chunks[0].overlap_param_gather_with_optimizer_step = True
    refused("optimizer")
    chunks[0].overlap_param_gather_with_optimizer_step = False
    refused("sharded", type("TorchFullyShardedDataParallel", (nn.Sequential,), {})(chunks[0].module))
    refused("dense", nn.Linear(2, 2))
    balance(chunks, mode="off").remove()
    return messages


def test_balance_refuses_real_models(one_rank: RankPool) -> None:
    (messages,) = one_rank.call(refuse_real_models)
    start = "this Megatron model can't be balanced: "
    assert messages["dispatcher"].startswith(start + "MoE layer 2 dispatches by MoEAllGatherTokenDispatcher")
    assert messages["router"].startswith(start + "MoE layer 2 has a Identity")
    assert messages["layer"].startswith(start + "MoE layer 2 is a LatentMoELayer")
    assert messages["experts"].startswith(start + "MoE layer 2 has experts in Identity")
    assert messages["three"].startswith(start + "fp8=e4m3 is not supported: ")
    assert messages["three"].endswith("(2 more: trimtab doctor --megatron lists them)")
    assert messages["wrapper"].startswith(start + "delay_wgrad_compute=True")
    assert messages["optimizer"].startswith(start + "overlap_param_gather_with_optimizer_step=True")
    assert messages["sharded"].startswith(start + "the model is in TorchFullyShardedDataParallel")
    assert messages["dense"].startswith("the model has no MoE layers")


def options_of_megatron(_state: dict[str, Any]) -> dict[str, Any]:
    """All options of Megatron's configurations with their defaults."""
    from dataclasses import fields

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes: Any = TransformerConfig, DistributedDataParallelConfig, OptimizerConfig
    defaults = {field.name: field.default for each in classes for field in fields(each)}
    # Others would import Megatron in the process of the tests.
    return {name: value if isinstance(value, bool | int | float | str) else None for name, value in defaults.items()}


def test_the_tables_have_the_names_and_defaults_of_megatron(one_rank: RankPool) -> None:
    (defaults,) = one_rank.call(options_of_megatron)
    assert names() - set(defaults) <= ELSEWHERE
    assert set(refusals(defaults)) == {"moe_token_dispatcher_type"}
    assert set(never_run(defaults)) == {"transformer_impl"}


@pytest.mark.parametrize("option", NEVER_RUN, ids=lambda option: option.name)
def test_options_that_have_never_run_are_not_refused(option: Any) -> None:
    value = {"transformer_impl": "transformer_engine"}.get(option.name, True)
    assert refusals({option.name: value}) == {}
    assert never_run({option.name: value})[option.name].startswith(f"{option.name}={value} has never run with Trimtab")


def test_values_that_have_never_run_are_named() -> None:
    assert "optimizer=muon" in never_run({"optimizer": "muon"})["optimizer"]
    assert never_run({"optimizer": "adam", "moe_router_load_balancing_type": "aux_loss"}) == {}
    assert "global_aux_loss" in str(never_run({"moe_router_load_balancing_type": ["global_aux_loss", "aux_loss"]}))
    assert set(never_run({"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]})) == {"cuda_graph_impl"}
    assert never_run({"cuda_graph_impl": "local", "cuda_graph_scope": ["moe"]}) == {}
