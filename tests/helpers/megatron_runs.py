"""Training steps of a small Megatron model: Megatron's own run against the same with balanced experts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from examples.megatron_on_cpu import use_cpu
from helpers.examples import examples
from helpers.fake_te import use_grouped_experts
from helpers.late_device import unwaited
from helpers.megatron_recipes import RECIPES, build_recipe
from helpers.megatron_specs import parts_of_spec
from helpers.random_choices import quotas_of_few
from helpers.random_plans import random_group_plans
from trimtab.array_type import Array
from trimtab.planner import Placement, PlannedStep, Schedule, plan_schedule
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.runtime import step_planner
from trimtab.runtime.live import balancer
from trimtab.runtime.live.balancer import LivePolicy

VOCABULARY, LENGTH = 64, 16
# Halves of these buckets end within the weights of an expert.
BUCKET = 1500


@dataclass(frozen=True)
class Layout:
    """How the ranks are used; the remaining ranks are data-parallel."""

    ranks: int
    expert: int
    tensor: int = 1
    pipeline: int = 1
    interleaved: bool = False
    context: int = 1


@dataclass(frozen=True)
class MegatronCase:
    """Options of one comparison; the names are Megatron's.

    Attributes:
        adam: Adam instead of SGD; the distributed optimizer always uses it.
        grouped, fused: see `fake_te`.
        per_token: losses are summed over tokens, and divided by their number on all ranks at the end of the step.
        pipelined_layers: as many layers as with two pipeline stages, on any layout.
        dense_stage: the second half of the layers are dense, not the first alone.
        balanced_routers: routers have an auxiliary loss, and a bias by expert that follows the loads.
        flex: backend of the flex dispatcher, see `fake_deep_ep`; None for all-to-all.
        live: policy of live micro-steps; None for planned ones.
        recipe: the model is that of `RECIPES`.
        core_attention: takes the place of Megatron's.
        options: further ones of the TransformerConfig.
        training: further ones of the DistributedDataParallelConfig and the OptimizerConfig; others are left out.
    """

    seed: int = 0
    steps: int = examples(short=2, long=5)
    recompute: str = "none"
    distributed_optimizer: bool = False
    adam: bool = False
    overlap: bool = False
    random_plans: bool = True
    router_replay: bool = False
    double: bool = False
    bf16: bool = False
    per_token: bool = False
    dense_stage: bool = False
    pipelined_layers: bool = False
    frozen: bool = False
    bias: bool = False
    grouped: bool = False
    fused: bool = False
    balanced_routers: bool = False
    flex: str | None = None
    live: LivePolicy | None = None
    recipe: str | None = None
    core_attention: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        if self.bf16:
            return torch.bfloat16
        return torch.float64 if self.double else torch.float32


BALANCED_ROUTERS: dict[str, Any] = {
    "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5, "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid", "moe_router_bias_update_rate": 0.05,
}  # fmt: skip
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "moe_act": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}


# Options of TransformerConfig that a small model takes from a user's, by their beginnings; without sizes, and without
# those that need a GPU, or a library for one.
TAKEN = ("moe_", "recompute_", "deallocate_pipeline_outputs", "add_qkv_bias")
SIZES = {
    "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq", "recompute_num_layers", "moe_router_num_groups",
    "moe_router_group_topk", "moe_shared_expert_intermediate_size",
}  # fmt: skip
NEED_GPU = {
    "moe_grouped_gemm", "moe_permute_fusion", "moe_token_dispatcher_type", "moe_flex_dispatcher_backend",
    "moe_router_dtype",
}  # fmt: skip
TRAINING = {
    "overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32", "average_in_collective", "clip_grad",
    "weight_decay", "sgd_momentum",
}  # fmt: skip


def layout_of(values: Mapping[str, Any]) -> Layout:
    """The layout of a user's options, with sizes of at most 2.

    Args:
        values: by their name in Megatron's configurations, as `read_options` returns them.
    """
    sizes = (values.get(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline"))
    tensor, pipeline = (min(2, int(size or 1)) for size in sizes)
    chunks = values.get("virtual_pipeline_model_parallel_size") or values.get("num_layers_per_virtual_pipeline_stage")
    return Layout(2 * pipeline, 2, tensor, pipeline, interleaved=bool(chunks) and pipeline > 1)


def case_of(values: Mapping[str, Any]) -> MegatronCase:
    """A small model with a user's options, see `layout_of`."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    taken = {name: value for name, value in _fields_of(TransformerConfig, values).items() if name.startswith(TAKEN)}
    options = {name: value for name, value in taken.items() if name not in SIZES | NEED_GPU}
    kinds = options.get("moe_router_load_balancing_type")
    if isinstance(kinds, list):
        # As Megatron reads its flags.
        options["moe_router_load_balancing_type"] = kinds[0] if len(kinds) == 1 else kinds
        if len(kinds) > 1 and not isinstance(options.get("moe_aux_loss_coeff"), list):
            options["moe_aux_loss_coeff"] = [options.get("moe_aux_loss_coeff", 0.0)] * len(kinds)
    if "moe_router_num_groups" in taken:
        options |= {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
    if options.get("recompute_granularity") == "full":
        options["recompute_num_layers"] = 1
    # Activations of experts alone are recomputed only by grouped experts.
    options["recompute_modules"] = [each for each in options.get("recompute_modules", []) if each != "moe_act"] or None
    if options.get("recompute_granularity") == "selective" and options["recompute_modules"] is None:
        del options["recompute_granularity"]
    if "moe_shared_expert_intermediate_size" not in taken:
        options["moe_shared_expert_intermediate_size"] = None
    options["gated_linear_unit"] = bool(values.get("swiglu", values.get("gated_linear_unit", True)))
    return MegatronCase(
        distributed_optimizer=bool(values.get("use_distributed_optimizer")), bf16=bool(values.get("bf16")),
        adam=values.get("optimizer") != "sgd", per_token=bool(values.get("calculate_per_token_loss")),
        options=options, training={name: value for name, value in values.items() if name in TRAINING},
    )  # fmt: skip


def _fields_of(config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that a configuration has, and that are set."""
    known = {each.name for each in fields(config)}
    return {name: value for name, value in values.items() if name in known and value is not None}


def compare_runs(layout: Layout, cases: Sequence[MegatronCase]) -> list[float]:
    """The worst relative difference of a loss, `main_grad` or parameter, by case."""
    use_layout(layout)
    return [_Comparison(layout, case).worst() for case in cases]


use_cpu_once = cache(use_cpu)


def use_layout(layout: Layout) -> None:
    """Create Megatron's process groups, in place of those of another layout."""
    torch.set_num_threads(1)
    # Megatron compiles some functions of routers for CUDA.
    torch.compiler.set_stance("force_eager")
    use_cpu_once()
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    # It has the number of layers of the first model, for good.
    get_moe_layer_wise_logging_tracker().clear()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor, pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=2 if layout.interleaved else None,
        context_parallel_size=layout.context, expert_model_parallel_size=layout.expert, expert_tensor_parallel_size=1,
    )  # fmt: skip


class Model:
    """A model with DDP and optimizer, and its training steps.

    Attributes:
        may_wait: whether the host may wait for a simulated device in forwards.
        gathers_late: parameters are complete in the next forward.
    """

    may_wait = True

    def __init__(self, layout: Layout, case: MegatronCase) -> None:
        from megatron.core import distributed, parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

        self.layout, self.case = layout, case
        model_parallel_cuda_manual_seed(7 + case.seed)
        chunks = 2 if layout.interleaved else 1
        layers = 2 * layout.pipeline * chunks if layout.pipeline > 1 else 4 if case.pipelined_layers else 3
        options: dict[str, Any] = dict(
            num_layers=layers, hidden_size=16, num_attention_heads=4, ffn_hidden_size=32, moe_ffn_hidden_size=24,
            num_moe_experts=8, moe_router_topk=2, expert_model_parallel_size=layout.expert,
            tensor_model_parallel_size=layout.tensor, sequence_parallel=layout.tensor > 1,
            pipeline_model_parallel_size=layout.pipeline, expert_tensor_parallel_size=1,
            virtual_pipeline_model_parallel_size=chunks if layout.interleaved else None,
            context_parallel_size=layout.context,
            # Without, Megatron mixes up activations and gradients between two interleaved stages.
            overlap_p2p_comm=layout.interleaved, batch_p2p_comm=not layout.interleaved,
            moe_token_dispatcher_type="flex" if case.flex else "alltoall", use_cpu_initialization=True,
            moe_flex_dispatcher_backend=case.flex or "deepep", add_bias_linear=case.bias,
            gated_linear_unit=True, activation_func=torch.nn.functional.silu, attention_dropout=0.0,
            hidden_dropout=0.0, bias_activation_fusion=False, params_dtype=case.dtype, pipeline_dtype=case.dtype,
            masked_softmax_fusion=False,
            moe_shared_expert_intermediate_size=None if case.bias else 24, init_method_std=0.3,
            gradient_accumulation_fusion=case.fused and not case.grouped, moe_grouped_gemm=case.grouped,
            moe_layer_freq=[int(layer < layers // 2 if case.dense_stage else layer > 0) for layer in range(layers)],
            moe_enable_routing_replay=case.router_replay, bf16=case.bf16, calculate_per_token_loss=case.per_token,
            moe_router_dtype="fp64" if case.double else "fp32" if case.bf16 else None,
            **BALANCED_ROUTERS if case.balanced_routers else {"moe_router_load_balancing_type": "none"},
            **RECOMPUTE[case.recompute],
        )  # fmt: skip
        recipe = None if case.recipe is None else RECIPES[case.recipe]
        if recipe is not None:
            options |= {"num_layers": 4, **recipe.options}
        options |= case.options
        is_mla = "multi_latent_attention" in options
        self.config = config = (MLATransformerConfig if is_mla else TransformerConfig)(**options)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        self.models, self.chunks = [], []
        for chunk in range(chunks):
            virtual = chunk if layout.interleaved else None
            torch.manual_seed(case.seed)
            # Each rank draws the same numbers up to its experts; Megatron sets its own seeds for these.
            place: dict[str, Any] = {
                "pre_process": stage == 0 and chunk == 0, "vp_stage": virtual,
                "post_process": stage == layout.pipeline - 1 and chunk == chunks - 1,
            }  # fmt: skip
            if recipe is None:
                spec = get_gpt_decoder_block_spec(
                    config, use_transformer_engine=False, normalization="LayerNorm", vp_stage=virtual
                )
                attention = _slice_attention() if layout.context > 1 else case.core_attention
                for part in parts_of_spec(spec):
                    if attention is not None and hasattr(part, "core_attention"):
                        part.core_attention = attention
                if case.grouped:
                    use_grouped_experts(spec, fuse_wgrad_accumulation=case.fused)
                model = GPTModel(
                    config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH, position_embedding_type="rope",
                    share_embeddings_and_output_weights=False, **place,
                )  # fmt: skip
            else:
                model = build_recipe(recipe, config, VOCABULARY, LENGTH, **place)
            model.to(case.dtype)
            if case.frozen:
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(".experts." not in name or "linear_fc1" not in name)
            ddp_options: dict[str, Any] = {
                "grad_reduce_in_fp32": not case.double, "overlap_grad_reduce": case.overlap,
                "overlap_param_gather": case.overlap and case.distributed_optimizer,
                "use_distributed_optimizer": case.distributed_optimizer, "bucket_size": BUCKET,
            }  # fmt: skip
            kind = distributed.DistributedDataParallelConfig
            ddp_config = kind(**ddp_options | _fields_of(kind, case.training))
            self.models.append(model)
            inner = Float16Module(config, model) if case.bf16 else model
            ddp = distributed.DistributedDataParallel(config, ddp_config, inner, disable_bucketing=chunk > 0)
            ddp.train()
            self.chunks.append(ddp)
        config.no_sync_func = _all_or_one([ddp.no_sync for ddp in self.chunks])
        if ddp_config.overlap_grad_reduce:
            config.grad_sync_func = _all_or_one([ddp.start_grad_sync for ddp in self.chunks])
        self.gathers_late: bool = ddp_config.overlap_param_gather
        if self.gathers_late:
            config.param_sync_func = _all_or_one([ddp.start_param_sync for ddp in self.chunks])
        config.finalize_model_grads_func = distributed.finalize_model_grads
        optimizer: dict[str, Any] = {
            "optimizer": "adam" if case.distributed_optimizer or case.adam else "sgd",
            "weight_decay": 0.0, "adam_eps": 1e-2,
            # In bfloat16 larger steps let two runs drift apart by rounding alone.
            "lr": 1e-5 if case.bf16 else 1e-3 if case.distributed_optimizer or case.adam else 0.05,
            "clip_grad": 0.0 if case.double else 1.0, "params_dtype": case.dtype, "bf16": case.bf16,
            "use_distributed_optimizer": case.distributed_optimizer, "sgd_momentum": 0.5,
            "overlap_param_gather": self.gathers_late,
        }  # fmt: skip
        optimizer |= _fields_of(OptimizerConfig, case.training)
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**optimizer), self.chunks)

    def moe_layers(self) -> Iterator[Any]:
        """Those that routing is recorded of."""
        from megatron.core.transformer.moe.moe_layer import MoELayer

        for model in self.models:
            for name, module in model.named_modules():
                if isinstance(module, MoELayer) and not name.startswith("mtp."):
                    yield module

    def run(self, function: Any, tokens_MBS: torch.Tensor, *, forward_only: bool = False) -> float:
        """One call of a forward-backward function; the sum of this rank's losses."""
        position = torch.arange(LENGTH)[None]
        mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
        total = 0.0

        def forward_step(iterator: Any, model: Any, checkpoints: bool | None = None) -> Any:
            if checkpoints is not None:
                # Megatron asks for it by micro-batch.
                self.config.recompute_granularity = "full" if checkpoints else None
            tokens = next(iterator)[None]
            with contextlib.nullcontext() if self.may_wait else unwaited():
                output = model(tokens, position, mask, labels=tokens.roll(-1, 1))

            def loss_of(losses: torch.Tensor) -> Any:
                nonlocal total
                total += float(losses.detach().sum())
                if self.case.per_token:
                    return losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {}
                return losses.double().mean().to(losses.dtype), {}

            return output, loss_of

        function(
            forward_step_func=forward_step, data_iterator=_all_or_one([iter(tokens_MBS) for _ in self.chunks]),
            model=_all_or_one(self.chunks), num_microbatches=len(tokens_MBS), seq_length=LENGTH,
            micro_batch_size=1, forward_only=forward_only,
        )  # fmt: skip
        return total

    def record(self, function: Any, tokens_MBS: torch.Tensor) -> list[Array]:
        """The experts `[n, L, K]` that this rank's routers choose for each micro-batch."""
        found: dict[int, list[torch.Tensor]] = {}

        def keep(layer: int, _router: Any, _args: Any, output: Any) -> None:
            found.setdefault(layer, []).append(output[1].nonzero()[:, 1].view(len(output[1]), -1))

        with contextlib.ExitStack() as stack:
            for number, layer in enumerate(self.moe_layers()):
                stack.callback(layer.router.register_forward_hook(partial(keep, number)).remove)
            self.run(function, tokens_MBS, forward_only=True)
        if not found:
            return [np.empty((LENGTH, 0, self.config.moe_router_topk), np.int64)] * len(tokens_MBS)
        by_layer = [found[layer] for layer in sorted(found)]
        return [torch.stack(ids, dim=1).cpu().numpy() for ids in zip(*by_layer, strict=True)]

    def named_parameters(self) -> dict[str, Any]:
        return {f"{c}.{name}": p for c, model in enumerate(self.models) for name, p in model.named_parameters()}

    def copy(self) -> Model:
        """A model with the same parameters."""
        copied = Model(self.layout, self.case)
        for parameter, own in zip(copied.named_parameters().values(), self.named_parameters().values(), strict=True):
            parameter.data.copy_(own.data)
        copied.optimizer.reload_model_params()
        return copied

    def zero(self) -> None:
        """Zero all gradients, as before a step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()


def _all_or_one(values: list[Any]) -> Any:
    """As Megatron takes values for model chunks: a list only if there are several."""
    return values if len(values) > 1 else values[0]


def _slice_attention() -> Any:
    """With context parallelism, attention to the tokens of this rank alone; Megatron leaves the rest to Transformer
    Engine."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class SliceAttention(DotProductAttention):
        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(replace(config, context_parallel_size=1), *args, **options)

    return SliceAttention


class _Comparison:
    def __init__(self, layout: Layout, case: MegatronCase) -> None:
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        from trimtab.integrations.megatron import balance

        self.layout, self.case = layout, case
        self.function = get_forward_backward_func()
        self.plain = Model(layout, case)
        self.balanced = self.plain.copy()
        self.balanced.may_wait = case.live is not None
        # The planner balances such small steps only if it has to.
        options: dict[str, Any] = {"slots_per_rank": 2} if case.random_plans else {"slots_per_rank": 6, "exact": True}
        if case.live is not None:
            options = {"slots_per_rank": 2, "mode": "live", "policy": case.live}
        self.session = balance(self.balanced.chunks, **options)
        self.plan_rng = np.random.default_rng((case.seed, dist.get_rank() // 2))
        self.replicas = 0
        self.has_experts = any(True for _ in self.plain.moe_layers())

    def worst(self) -> float:
        """The worst relative difference."""
        from megatron.core import parallel_state

        rng = np.random.default_rng((self.case.seed, parallel_state.get_data_parallel_rank(with_context_parallel=True)))
        found: list[float] = []
        for step in range(self.case.steps):
            micro_batches = 4 if self.layout.pipeline > 1 else 3
            tokens_MBS = torch.from_numpy(rng.integers(0, VOCABULARY, (micro_batches, LENGTH)))
            routing = self.plain.record(self.function, tokens_MBS)
            planner = self.random_plans if self.case.random_plans else plan_schedule
            with (
                mock.patch.object(step_planner, "plan_schedule", planner),
                # Few tokens are enough for a replica.
                mock.patch.object(balancer, "choose_quotas", quotas_of_few),
            ):
                planned = self.session.live(self.function)
                if self.case.live is None:
                    planned = self.session.planned(self.function, routing)
                self.plain.zero()
                self.balanced.zero()
                expected = self.plain.run(self.function, tokens_MBS)
                if step == 1:
                    # Log-probs first; then the same plan's update.
                    self.balanced.run(planned, tokens_MBS, forward_only=True)
                actual = self.balanced.run(planned, tokens_MBS)
            metrics = self.session.take_metrics()
            assert metrics.get("moe/unplanned_micro_steps", 0) == 0
            assert (self.session.report is None) == (not self.has_experts or self.case.live is not None)
            self.replicas += 0 if self.session.report is None else self.session.report.replicas
            self.replicas += int(metrics.get("live/replicas", 0))
            found += [abs(actual - expected) / max(abs(expected), 1e-30), *self.differences("main_grad")]
            for model in (self.plain, self.balanced):
                model.optimizer.step()
            if not self.plain.gathers_late:
                found += self.differences("data")
        assert (self.replicas > 0) == (self.has_experts and self.case.live != "off"), self.replicas
        self.session.remove()
        return max(found)

    def differences(self, what: str) -> Iterator[float]:
        """Relative differences of all trained parameters or their gradients."""
        balanced = self.balanced.named_parameters()
        for name, parameter in self.plain.named_parameters().items():
            if parameter.requires_grad:
                expected, actual = getattr(parameter, what).double(), getattr(balanced[name], what).double()
                yield float((actual - expected).norm()) / max(float(expected.norm()), 1e-6)

    def random_plans(
        self, loads: StepLoads, schedule: Schedule, placement: Placement, _cluster: Any, **_chosen: Any
    ) -> PlannedStep:
        """Replaces the planner on the first rank of each group."""
        assert self.session.session is not None
        ranks_per_node = self.session.session.topology.ranks_per_node
        return random_group_plans(self.plan_rng, loads, schedule, placement, ranks_per_node)
