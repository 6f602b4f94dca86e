"""`MegatronLayers`: MoE layers of Megatron-core in DDP; `LayerCase`: their sizes, and routing of a chosen imbalance."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks.replayed_megatron import ReplayedMegatron
from trimtab.array_type import Array
from trimtab.calibration.measurement import this_device
from trimtab.cluster import ModelSpec

# The search for a popularity with the wanted max/mean.
SAMPLE, HALVINGS = 2048, 20
# Of tokens and of the gradient of the output.
SCALE = 0.1


@dataclass(frozen=True)
class LayerCase:
    """What is timed.

    Attributes:
        model: sizes; `num_experts` is that of all ranks of this run.
        tokens: of a rank in a micro-batch.
        max_over_mean: rows of the busiest rank over the mean, as wanted.
        layers, micro_batches: of a step.
    """

    model: ModelSpec
    tokens: int
    max_over_mean: float
    layers: int = 2
    micro_batches: int = 4

    def routing(self, ranks: int, seed: int) -> list[list[Array]]:
        """By rank and micro-batch the ids `[tokens, L, K]` int32; the same on every rank that asks."""
        rng = np.random.default_rng(seed)
        boost = _boost(self, ranks, rng)
        return [[self._draw(boost, ranks, self.tokens, rng) for _ in range(self.micro_batches)] for _ in range(ranks)]

    def _draw(self, boost: float, ranks: int, tokens: int, rng: np.random.Generator) -> Array:
        """Different experts for each token; those of the first rank are `exp(boost)` as popular as the others."""
        experts, top_k = self.model.num_experts, self.model.top_k
        scores_NLE = rng.gumbel(size=(tokens, self.layers, experts)).astype(np.float32)
        scores_NLE[:, :, : experts // ranks] += boost
        return np.argpartition(-scores_NLE, top_k - 1, axis=-1)[:, :, :top_k].astype(np.int32)


def _boost(case: LayerCase, ranks: int, rng: np.random.Generator) -> float:
    """The popularity of the first rank's experts that gives the wanted max/mean."""
    low, high = 0.0, 8.0
    if case.max_over_mean <= 1 or ranks == 1:
        return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        ids = case._draw(middle, ranks, SAMPLE // case.layers, rng)
        share = np.mean(ids < case.model.num_experts // ranks) * ranks
        low, high = (middle, high) if share < case.max_over_mean else (low, middle)
    return (low + high) / 2


class _Stack(MegatronModule):
    """MoE layers, each with a residual."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: TransformerConfig, spec: Any, layers: int) -> None:
        super().__init__(config)
        self.layers = torch.nn.ModuleList(
            [build_module(spec, config=config, layer_number=number + 1) for number in range(layers)]
        )

    def set_input_tensor(self, _tensor: Any) -> None:
        """Megatron's schedules call it; there is no pipeline."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of `[tokens, 1, hidden]`."""
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return hidden


class MegatronLayers(ReplayedMegatron):
    """The layers on this rank. Those of the same case have equal weights.

    Transformer Engine computes experts and merges their gradients, if it is installed; else one MLP after the other.

    Args:
        grouped_linear: takes the place of Transformer Engine's class, which need not be installed then.

    Attributes:
        engine: what computes experts.
    """

    def __init__(self, case: LayerCase, grouped_linear: type[torch.nn.Module] | None = None) -> None:
        device = this_device()
        has_engine = device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None
        self.engine = "TEGroupedMLP" if has_engine or grouped_linear else "SequentialMLP"
        model_parallel_cuda_manual_seed(0)
        torch.manual_seed(0)
        config = _config(case, has_engine)
        spec = get_moe_module_spec(has_engine, case.model.num_experts, moe_grouped_gemm=has_engine)
        if grouped_linear:
            spec.submodules.experts = ModuleSpec(
                TEGroupedMLP, submodules=MLPSubmodules(linear_fc1=grouped_linear, linear_fc2=grouped_linear)
            )
        stack = _Stack(config, spec, case.layers).to(device)
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (2, case.micro_batches, case.tokens, 1, case.model.hidden_size)
        values = (torch.randn(shape, generator=generator) * SCALE).to(device, config.params_dtype)
        self._hidden_MN, self._target_MN = values[0].requires_grad_(), values[1]
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        super().__init__(stack, options, range(case.micro_batches), (1, case.tokens))

    def _forward(self, batches: Iterator[int], model: Any) -> tuple[torch.Tensor, Any]:
        number = next(batches)
        output = model(self._hidden_MN[number])
        return output, lambda output: ((output * self._target_MN[number]).sum(), {})


def _config(case: LayerCase, has_engine: bool) -> TransformerConfig:
    on_cuda = this_device().type == "cuda"
    model = case.model
    return TransformerConfig(
        num_layers=case.layers, hidden_size=model.hidden_size, num_attention_heads=4, num_moe_experts=model.num_experts,
        ffn_hidden_size=model.expert_width, moe_ffn_hidden_size=model.expert_width, moe_router_topk=model.top_k,
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1,
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none", moe_enable_routing_replay=True,
        moe_grouped_gemm=has_engine, moe_permute_fusion=has_engine, gradient_accumulation_fusion=has_engine,
        use_cpu_initialization=not on_cuda, perform_initialization=True, bf16=on_cuda,
        params_dtype=torch.bfloat16 if on_cuda else torch.float32, moe_router_dtype="fp32" if has_engine else None,
        add_bias_linear=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        bias_activation_fusion=has_engine,
    )  # fmt: skip
