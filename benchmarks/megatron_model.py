"""The Megatron model of `python -m benchmarks.megatron`, on the CPU: a GPTModel in DDP, its sizes, routing and step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks.replayed_megatron import ReplayedMegatron, Routing
from trimtab.trace import synthesize

VOCABULARY = 256
HEADS = 4


@dataclass(frozen=True)
class MegatronBenchmark:
    """Sizes of the benchmark.

    Attributes:
        pairs: timed rounds of all variants.
        seeds: skewed routings, of the seeds 0 to seeds - 1, at most one for each pair. Rounds use them in turn.
        json: file for the figures; None for none.
        micro_batches: micro-batches of a step.
        sequences: sequences of a micro-batch on each rank.
        sequence_length: tokens of a sequence.
        layers, experts, top_k, hidden, width: sizes of the model; `width` is that of an expert.
        slots: slots per rank.
        zipf: exponent of the skewed routing. The load of two ranks differs less than that of many: an exponent of 2
            gives max/mean of 1.1 to 1.5 here, where 1.2 gives 1.7 to 2.1 with 128 experts, top-8, on 8 ranks.
    """

    pairs: int = 40
    seeds: int = 8
    json: Path | None = None
    micro_batches: int = 2
    sequences: int = 4
    sequence_length: int = 512
    layers: int = 4
    experts: int = 16
    top_k: int = 4
    hidden: int = 256
    width: int = 512
    slots: int = 2
    zipf: float = 2.0

    def routings(self, ranks: int, rank: int) -> list[Routing]:
        """Routing of a rank: exactly even routing, then every skewed one."""
        skewed = [self._draw(ranks, rank, self.zipf, seed) for seed in range(min(self.seeds, self.pairs))]
        return [self._draw(ranks, rank, 0.0, 0), *skewed]

    def _draw(self, ranks: int, rank: int, zipf: float, seed: int) -> Routing:
        mine = self.micro_batches * self.sequences
        trace = synthesize(
            num_sequences=mine * ranks, sequence_length=self.sequence_length, num_layers=self.layers,
            num_experts=self.experts, top_k=self.top_k, zipf=zipf, seed=seed,
        )  # fmt: skip
        sequences = [trace.sequence(number) for number in range(rank * mine, (rank + 1) * mine)]
        return [np.concatenate(sequences[first : first + self.sequences]) for first in range(0, mine, self.sequences)]


class MegatronModel(ReplayedMegatron):
    """A model in DDP. Models of the same settings have equal weights."""

    def __init__(self, settings: MegatronBenchmark) -> None:
        model_parallel_cuda_manual_seed(0)
        torch.manual_seed(0)
        config = _config(settings)
        spec = get_gpt_layer_local_spec(settings.experts, normalization="LayerNorm")
        model = GPTModel(
            config, spec, vocab_size=VOCABULARY, max_sequence_length=settings.sequence_length,
            position_embedding_type="rope",
        )  # fmt: skip
        config.finalize_model_grads_func = finalize_model_grads
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = settings.sequences, settings.sequence_length
        tokens_MBT = torch.randint(VOCABULARY, (settings.micro_batches, *shape), generator=generator)
        super().__init__(model, DistributedDataParallelConfig(), tokens_MBT.unbind(), shape)
        self._positions = torch.arange(settings.sequence_length).expand(shape)
        is_later_TT = torch.ones(settings.sequence_length, settings.sequence_length, dtype=torch.bool).triu(1)
        self._mask = is_later_TT[None, None]

    def _forward(self, batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
        tokens_BT = next(batches)
        losses = model(tokens_BT, self._positions, self._mask, labels=tokens_BT.roll(-1, 1))
        return losses, lambda losses: (losses.mean(), {})


def _config(settings: MegatronBenchmark) -> TransformerConfig:
    return TransformerConfig(
        num_layers=settings.layers, hidden_size=settings.hidden, num_attention_heads=HEADS,
        ffn_hidden_size=settings.width, moe_ffn_hidden_size=settings.width, num_moe_experts=settings.experts,
        moe_router_topk=settings.top_k, expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1,
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none", moe_enable_routing_replay=True,
        use_cpu_initialization=True, add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu,
        bias_activation_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip
