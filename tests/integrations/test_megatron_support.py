"""What of a Megatron configuration is refused, by name; a supported one has no problem."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import MISSING, fields, make_dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from helpers.rank_pool import RankPool, shared_pool
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import InputError
from trimtab.integrations import megatron as megatron_package
from trimtab.integrations.megatron.option_tables import NEVER_RUN, REFUSED, names, never_run, refusals

State = dict[str, Any]
# Refused options that are switched on, and for every other one a value with which Megatron runs.
ON = [
    "hybrid_context_parallel", "moe_router_fusion", "moe_router_force_load_balancing", "moe_token_dropping",
    "moe_pad_expert_input_to_capacity", "moe_router_padding_for_quantization", "moe_router_padding_for_fp8",
    "overlap_moe_expert_parallel_comm", "fp8_param", "fp4_param", "fp8_param_gather",
    "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag", "use_kitchen",
    "moe_use_legacy_grouped_gemm", "moe_single_grouped_weight", "moe_single_grouped_bias",
    "use_transformer_engine_op_fuser", "moe_apply_probs_on_input", "delay_wgrad_compute",
    "overlap_dispatch_backward_with_experts_wgrad", "use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2",
    "overlap_param_gather_with_optimizer_step", "moe_paged_stash", "batch_invariant_mode",
    "moe_use_grouped_tensor",
]  # fmt: skip
VALUES: dict[str, Any] = dict.fromkeys(ON, True) | {
    "expert_tensor_parallel_size": 2, "expert_tensor_parallel_num_weight_shards": 2,
    "expert_gtp_weight_remat_size": 2, "moe_router_force_biased": 0.1, "moe_expert_capacity_factor": 1.25,
    "moe_expert_rank_capacity_factor": 1.0,
    "moe_token_dispatcher_type": "allgather",
    "moe_flex_dispatcher_backend": "ncclep", "moe_dispatch_fwd_dtype": "mxfp8", "moe_combine_bwd_dtype": "mxfp8",
    "fp8": "hybrid", "fp4": "e2m1", "quant_recipe": "recipe", "mlp_chunks_for_training": 2,
    "num_distributed_optimizer_instances": 2, "transformer_impl": "inference_optimized",
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
    ("moe_router_load_balancing_type", {"moe_router_load_balancing_type": "quantile_balancing"}),
    ("offload_modules", {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", "moe_act"]}),
]
SUPPORTED: list[dict[str, Any]] = [
    {}, {"expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"moe_expert_capacity_factor": -1.0}, {"cuda_graph_impl": "none", "cuda_graph_scope": []},
    {"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]}, {"recompute_modules": ["moe_act", "layernorm"]},
    {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}, {"mtp_num_layers": 1},
    {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}, {"offload_modules": ["moe_act"]},
    {"an_option_of_later": "years"}, {"data_parallel_sharding_strategy": "optim_grads_params"},  # FSDP alone reads it.
]  # fmt: skip
# Options of Megatron-core later than 0.16.1, of its scripts, and of earlier versions.
ELSEWHERE = {
    "expert_tensor_parallel_num_weight_shards", "expert_gtp_weight_remat_size", "moe_router_force_biased",
    "moe_expert_rank_capacity_factor", "moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype", "fp4_param_gather",
    "moe_single_grouped_weight", "moe_single_grouped_bias", "moe_use_grouped_tensor", "moe_mlp_glu_interleave_size",
    "use_transformer_engine_op_fuser", "mlp_chunks_for_training", "enable_mhc_connections", "moe_paged_stash",
    "overlap_dispatch_backward_with_experts_wgrad", "use_torch_fsdp2", "cuda_graph_modules",
    "moe_use_legacy_grouped_gemm", "cuda_graph_scope", "enable_cuda_graph", "external_cuda_graph", "use_custom_fsdp",
}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = shared_pool(1, "megatron")
    yield pool
    pool.forget()


def model_of(state: State) -> Any:
    """A GPTModel with two MoE layers in DistributedDataParallel, and its layers."""
    if "model" not in state:
        from helpers.megatron_runs import Layout, MegatronCase, Model, use_layout

        use_layout(Layout(1, 1))
        model = Model(Layout(1, 1), MegatronCase())
        state["model"] = model.config, list(model.moe_layers()), model.chunks
    return state["model"]


def problems(state: State, options: dict[str, Any]) -> list[str]:
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
    assert {option.name for option in REFUSED} == set(VALUES)


REFUSALS = [*((name, {name: value}) for name, value in VALUES.items()), *JOINT]


@pytest.mark.parametrize(("name", "options"), REFUSALS)
@runs_on_ranks()
def test_refused_options_are_named(state: State, name: str, options: dict[str, Any]) -> None:
    (problem,) = problems(state, options)
    assert problem.startswith(f"{name}=")


def test_negative_numbers_switch_the_capacity_alone_off() -> None:
    negative = {name for name in VALUES if not refusals({name: -1.0})}
    assert negative == {"moe_expert_capacity_factor"}


def test_graphs_are_refused_with_the_modules_that_they_have() -> None:
    for modules, scope in (([], "the whole layer"), (["attn", "moe_router"], "[attn, moe_router]")):
        (problem,) = refusals({"cuda_graph_impl": "local", "cuda_graph_modules": modules}).values()
        assert f": its scope, {scope}, includes MoE layers" in problem


@pytest.mark.parametrize("options", SUPPORTED)
@runs_on_ranks()
def test_supported_options_have_no_problem(state: State, options: dict[str, Any]) -> None:
    assert problems(state, options) == []


@runs_on_ranks()
def test_balance_refuses_real_models(state: State) -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
    from torch import nn

    from trimtab.integrations.megatron import balance

    config, (layer, *_), chunks = model_of(state)

    def refused(message: str, model: Any = chunks) -> None:
        with pytest.raises(InputError, match=message):
            balance(model)

    def refused_with(part: str, other: Any, message: str) -> None:
        own = getattr(layer, part)
        setattr(layer, part, other)
        refused(f"^this Megatron model can't be balanced: MoE layer 2 {message}")
        setattr(layer, part, own)

    dispatcher = MoEAllGatherTokenDispatcher.__new__(MoEAllGatherTokenDispatcher)
    refused_with("token_dispatcher", dispatcher, "dispatches by MoEAllGatherTokenDispatcher")
    refused_with("router", nn.Identity(), "has a Identity")
    refused_with("__class__", type("LatentMoELayer", (MoELayer,), {}), "is a LatentMoELayer")
    refused_with("experts", nn.Identity(), "has experts in Identity")
    with mock.patch.multiple(config, fp8="e4m3", fp8_param=True):
        refused(r"balanced: fp8=e4m3 is not supported: .*\(1 more: trimtab doctor --megatron lists them\)$")
    for owner, name in (
        (config, "fp8_param"),
        (chunks[0].ddp_config, "delay_wgrad_compute"),
        (chunks[0], "overlap_param_gather_with_optimizer_step"),
    ):
        with mock.patch.object(owner, name, True, create=True):
            refused(f"balanced: {name}=True")
    sharded = type("TorchFullyShardedDataParallel", (nn.Sequential,), {})
    refused("balanced: the model is in TorchFullyShardedDataParallel", sharded(chunks[0].module))
    refused("the model has no MoE layers", nn.Linear(2, 2))
    balance(chunks, mode="off").remove()


@runs_on_ranks()
def test_the_tables_have_the_names_and_defaults_of_megatron(state: State) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes: Any = TransformerConfig, DistributedDataParallelConfig, OptimizerConfig
    defaults = {field.name: field.default for each in classes for field in fields(each)}
    defaults = {name: None if value is MISSING else value for name, value in defaults.items()}
    assert names() - set(defaults) <= ELSEWHERE
    assert set(refusals(defaults)) == {"moe_token_dispatcher_type"}
    assert set(never_run(defaults)) == {"transformer_impl"}


@pytest.mark.parametrize("option", NEVER_RUN, ids=lambda option: option.name)
def test_options_that_have_never_run_are_not_refused(option: Any) -> None:
    value = {"transformer_impl": "transformer_engine", "moe_latent_size": 8}.get(option.name, True)
    assert refusals({option.name: value}) == {}
    assert never_run({option.name: value})[option.name].startswith(f"{option.name}={value} has never run with Trimtab")


def test_values_that_have_never_run_are_named() -> None:
    assert "optimizer=muon" in never_run({"optimizer": "muon"})["optimizer"]
    assert never_run({"optimizer": "adam", "moe_router_load_balancing_type": "aux_loss"}) == {}
    assert "global_aux_loss" in str(never_run({"moe_router_load_balancing_type": ["global_aux_loss", "aux_loss"]}))
    assert set(never_run({"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]})) == {"cuda_graph_impl"}
    assert never_run({"cuda_graph_impl": "local", "cuda_graph_scope": ["moe"]}) == {}


@pytest.mark.parametrize(
    ("backend", "homes", "slots", "nodes", "variable", "found"),
    [
        ("deepep", 5, 2, [0, 0], None, 2),
        ("hybridep", 4, 1, [0, 0], None, 2),
        ("hybridep", 4, 2, [0, 0], None, 2),
        # All ranks have a multiple of 4, a node has not.
        ("hybridep", 4, 1, [0, 0, 1, 1], None, 2),
        ("hybridep", 4, 1, [0, 1, 0, 1], "4", 1),
        ("hybridep", 5, 0, None, None, 3),
        ("hybridep", 5, 1, [0, 0, 0], None, 3),
    ],
)
def test_hybrid_ep_gets_slots_that_its_kernels_need(
    backend: str, homes: int, slots: int, nodes: list[int] | None, variable: str | None, found: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

    from trimtab.integrations.megatron.support import HYBRID_EP_RANKS, fitting_slots

    monkeypatch.delenv(HYBRID_EP_RANKS, raising=False)
    if variable is not None:
        monkeypatch.setenv(HYBRID_EP_RANKS, variable)
    layer: Any = SimpleNamespace(
        token_dispatcher=MoEFlexTokenDispatcher.__new__(MoEFlexTokenDispatcher), num_local_experts=homes,
        config=SimpleNamespace(moe_flex_dispatcher_backend=backend),
    )  # fmt: skip
    assert fitting_slots(layer, slots, nodes) == found


@runs_on_ranks()
def test_options_that_are_not_known_give_one_warning(state: State) -> None:
    from trimtab.integrations.megatron import balance

    config, (layer, *_), chunks = model_of(state)
    later = [("moe_of_later", int, 3), ("router_of_later", int, 3), ("norm_of_later", int, 3)]
    layer.config = copy.copy(config)
    layer.config.__class__ = make_dataclass("Config", later, bases=(type(config),))
    vars(layer.config).update(moe_of_later=5, norm_of_later=5)
    vars(chunks[0]).update(ddp_config=replace(chunks[0].ddp_config, bucket_size=7))
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trimtab").addHandler(handler)
    balance(chunks, mode="off").remove()
    layer.config = config
    balance(chunks, mode="off").remove()
    logging.getLogger("trimtab").removeHandler(handler)
    (line,) = lines
    assert "does not know these options of Megatron: moe_of_later=5; compare" in line


def test_a_megatron_without_a_name_is_refused_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is replaced, whatever the name is for."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer.moe import token_dispatcher

    assert callable(megatron_package.balance)
    monkeypatch.delattr(DistributedOptimizer, "_get_model_param_range_map")
    monkeypatch.delattr(token_dispatcher, "_DeepepManager")
    message = (
        r"token_dispatcher has no _DeepepManager.* \(2 more\); this version of Trimtab fits megatron-core 0\.16\.1 to"
    )
    with pytest.raises(InputError, match=message):
        megatron_package.balance  # noqa: B018
