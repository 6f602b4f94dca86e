"""`SmallMegatron`: a small GPTModel with a user's Megatron options, on CPU ranks, and its training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from megatron.core import distributed, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from trimtab.array_type import Array

EXPERTS, TOP_K, WIDTH, HIDDEN, VOCABULARY, LENGTH, BUCKET = 8, 2, 24, 16, 64, 16, 1500
TAKEN = ("moe_", "recompute_", "calculate_per_token_loss", "deallocate_pipeline_outputs", "add_qkv_bias", "bf16")
"""Options of TransformerConfig that are taken, and the beginnings of their names."""
OF_SIZES = {
    "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq", "recompute_num_layers", "moe_router_num_groups",
    "moe_router_group_topk", "moe_shared_expert_intermediate_size",
}  # fmt: skip
NOT_ON_CPU = {
    "moe_grouped_gemm": False, "moe_permute_fusion": False, "moe_token_dispatcher_type": "alltoall",
    "moe_flex_dispatcher_backend": "deepep", "moe_router_dtype": None,
}  # fmt: skip
"""Options that need a GPU, or a library for one, and what is in their place."""
NOT_OF_DDP = {"bucket_size", "nccl_ub", "use_megatron_fsdp", "fp8_param_gather", "check_for_nan_in_grad"}


@dataclass(frozen=True)
class SmallLayout:
    """How the ranks of the small run are used; expert parallelism is 2.

    Attributes:
        tensor, pipeline: sizes, at most 2.
        chunks: model chunks of a rank.
    """

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1

    @property
    def ranks(self) -> int:
        return 2 * self.pipeline


def config_of(values: Mapping[str, Any], layout: SmallLayout) -> tuple[TransformerConfig, list[str]]:
    """The small model's config, and the options of the user's that are replaced."""
    known = {field.name for field in fields(TransformerConfig)}
    taken = {name: value for name, value in values.items() if name in known and name.startswith(TAKEN)}
    replaced = [f"{name}={taken[name]}" for name, value in NOT_ON_CPU.items() if taken.get(name, value) != value]
    kept = {name: value for name, value in taken.items() if name not in OF_SIZES | NOT_ON_CPU.keys()}
    kinds = kept.get("moe_router_load_balancing_type")
    if isinstance(kinds, list):
        # As Megatron reads its flags.
        kept["moe_router_load_balancing_type"] = kinds[0] if len(kinds) == 1 else kinds
        if len(kinds) > 1 and not isinstance(kept.get("moe_aux_loss_coeff"), list):
            kept["moe_aux_loss_coeff"] = [kept.get("moe_aux_loss_coeff", 0.0)] * len(kinds)
    layers = 2 * layout.pipeline * layout.chunks if layout.pipeline > 1 else 3
    groups = {"moe_router_num_groups": 4, "moe_router_group_topk": 2} if taken.get("moe_router_num_groups") else {}
    dtype = torch.bfloat16 if taken.get("bf16") else torch.float32
    if taken.get("recompute_granularity") == "full":
        kept["recompute_num_layers"] = 1
    is_gated = bool(values.get("swiglu", values.get("gated_linear_unit", True)))
    config = TransformerConfig(
        num_layers=layers, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=2 * HIDDEN,
        num_moe_experts=EXPERTS, moe_router_topk=TOP_K, moe_ffn_hidden_size=WIDTH,
        moe_layer_freq=[int(layer > 0) for layer in range(layers)],
        moe_shared_expert_intermediate_size=WIDTH if taken.get("moe_shared_expert_intermediate_size") else None,
        tensor_model_parallel_size=layout.tensor, sequence_parallel=layout.tensor > 1, expert_tensor_parallel_size=1,
        pipeline_model_parallel_size=layout.pipeline, expert_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        overlap_p2p_comm=layout.chunks > 1, batch_p2p_comm=layout.chunks == 1, use_cpu_initialization=True,
        add_bias_linear=False, gated_linear_unit=is_gated, activation_func=torch.nn.functional.silu,
        attention_dropout=0.0, hidden_dropout=0.0, bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, params_dtype=dtype,
        pipeline_dtype=dtype, init_method_std=0.3, **groups, **kept,
        **{name: value for name, value in NOT_ON_CPU.items() if name in known},
    )  # fmt: skip
    return config, replaced


class SmallMegatron:
    """The model on this rank. Two of the same options have equal weights.

    Args:
        values: the user's options, by their name in Megatron's configurations.

    Attributes:
        chunks: in DDP.
        replaced: options of the user's that the run has in another form.
    """

    def __init__(self, values: Mapping[str, Any], layout: SmallLayout) -> None:
        self.config, self.replaced = config_of(values, layout)
        model_parallel_cuda_manual_seed(7)
        known = {field.name for field in fields(DistributedDataParallelConfig)} - NOT_OF_DDP
        ddp = DistributedDataParallelConfig(
            bucket_size=BUCKET, **{name: value for name, value in values.items() if name in known and value is not None}
        )
        stage = parallel_state.get_pipeline_model_parallel_rank()
        self.chunks: list[Any] = []
        for number in range(layout.chunks):
            virtual = number if layout.chunks > 1 else None
            torch.manual_seed(0)
            spec = get_gpt_decoder_block_spec(
                self.config, use_transformer_engine=False, normalization="LayerNorm", vp_stage=virtual
            )
            model: Any = GPTModel(
                self.config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH, position_embedding_type="rope",
                pre_process=stage == 0 and number == 0, vp_stage=virtual, share_embeddings_and_output_weights=False,
                post_process=stage == layout.pipeline - 1 and number == layout.chunks - 1,
            ).to(self.config.params_dtype)  # fmt: skip
            inner = Float16Module(self.config, model) if self.config.bf16 else model
            self.chunks.append(DistributedDataParallel(self.config, ddp, inner, disable_bucketing=number > 0))
        self._set_hooks(ddp)
        self.config.finalize_model_grads_func = distributed.finalize_model_grads
        own = {name: values[name] for name in ("clip_grad", "weight_decay", "sgd_momentum") if name in values}
        kind = values.get("optimizer")
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer=kind if kind in ("adam", "sgd") else "adam", lr=1e-5 if self.config.bf16 else 1e-3,
                adam_eps=1e-2, params_dtype=self.config.params_dtype, bf16=self.config.bf16,
                use_distributed_optimizer=ddp.use_distributed_optimizer,
                overlap_param_gather=ddp.overlap_param_gather, **own,
            ),
            self.chunks,
        )  # fmt: skip

    def _set_hooks(self, ddp: DistributedDataParallelConfig) -> None:
        self.config.no_sync_func = _one_or_all([chunk.no_sync for chunk in self.chunks])
        if ddp.overlap_grad_reduce:
            self.config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in self.chunks])
        if ddp.overlap_param_gather:
            self.config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in self.chunks])

    @property
    def function(self) -> Callable[..., Any]:
        """Megatron's forward-backward function."""
        found: Callable[..., Any] = get_forward_backward_func()
        return found

    def moe_layers(self) -> Iterator[Any]:
        """Those of this rank, in order."""
        for chunk in self.chunks:
            yield from (module for module in chunk.modules() if isinstance(module, MoELayer))

    def zero(self) -> None:
        """Zero all gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def run(self, function: Callable[..., Any], tokens_MBS: torch.Tensor, *, forward_only: bool = False) -> float:
        """Calls a forward-backward function; returns the sum of this rank's losses."""
        positions = torch.arange(LENGTH)[None]
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
        total = 0.0

        def forward_step(iterator: Any, model: Any) -> Any:
            tokens = next(iterator)[None]

            def loss_of(losses: torch.Tensor) -> Any:
                nonlocal total
                total += float(losses.detach().sum())
                if self.config.calculate_per_token_loss:
                    return losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {}
                return losses.mean(), {}

            return model(tokens, positions, mask, labels=tokens.roll(-1, 1)), loss_of

        function(
            forward_step_func=forward_step, data_iterator=_one_or_all([iter(tokens_MBS) for _ in self.chunks]),
            model=_one_or_all(self.chunks), num_microbatches=len(tokens_MBS), seq_length=LENGTH, micro_batch_size=1,
            forward_only=forward_only,
        )  # fmt: skip
        return total

    def record(self, tokens_MBS: torch.Tensor) -> list[Array]:
        """The experts `[n, L, K]` that this rank's routers choose for every micro-batch."""
        found: list[list[torch.Tensor]] = [[] for _ in self.moe_layers()]

        def keep(layer: int, _router: Any, _args: Any, output: Any) -> None:
            found[layer].append(output[1].nonzero()[:, 1].view(len(output[1]), -1))

        with ExitStack() as stack, torch.no_grad():
            for number, layer in enumerate(self.moe_layers()):
                stack.callback(layer.router.register_forward_hook(partial(keep, number)).remove)
            self.run(self.function, tokens_MBS, forward_only=True)
        return [torch.stack(ids, dim=1).numpy() for ids in zip(*found, strict=True)]


def _one_or_all(values: list[Any]) -> Any:
    """As Megatron takes values for model chunks: a list only if there are several."""
    return values if len(values) > 1 else values[0]
