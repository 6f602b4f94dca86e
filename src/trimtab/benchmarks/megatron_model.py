"""The Megatron model of `trimtab bench megatron`, on the CPU: a GPTModel in DDP, and its training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig

from trimtab.benchmarks.megatron_settings import MegatronBenchmark
from trimtab.integrations.megatron.on_cpu import use_cpu

VOCABULARY = 256
HEADS = 4


def start_megatron() -> None:
    """Replace CUDA calls, and make all ranks one expert-parallel group. Collective."""
    use_cpu()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
    )


class MegatronModel:
    """A model in DDP. Models of the same settings have equal weights.

    Attributes:
        ddp: the model.
    """

    def __init__(self, settings: MegatronBenchmark) -> None:
        model_parallel_cuda_manual_seed(0)
        torch.manual_seed(0)
        config = _config(settings)
        spec = get_gpt_layer_local_spec(settings.experts, normalization="LayerNorm")
        model = GPTModel(
            config, spec, vocab_size=VOCABULARY, max_sequence_length=settings.sequence_length,
            position_embedding_type="rope",
        )  # fmt: skip
        self.ddp: Any = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        config.no_sync_func = self.ddp.no_sync
        config.finalize_model_grads_func = finalize_model_grads
        self._replays = [layer.router.router_replay for layer in model.modules() if isinstance(layer, MoELayer)]
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = settings.micro_batches, settings.sequences, settings.sequence_length
        self._tokens_MBT = torch.randint(VOCABULARY, shape, generator=generator)
        self._positions = torch.arange(settings.sequence_length).expand(shape[1:])
        is_later_TT = torch.ones(settings.sequence_length, settings.sequence_length, dtype=torch.bool).triu(1)
        self._mask = is_later_TT[None, None]

    def zero(self) -> None:
        """Zero all gradients."""
        self.ddp.zero_grad_buffer()

    def gradients(self) -> list[torch.Tensor]:
        """The `main_grad` of every parameter."""
        return [parameter.main_grad for parameter in self.ddp.parameters()]

    def step(self, forward_backward: Callable[..., Any]) -> None:
        """Forward and backward of all micro-batches, with complete gradients.

        Args:
            forward_backward: Megatron's function, or a planned one.
        """
        self._run(forward_backward, self._forward)

    def step_with_replay(self, forward_backward: Callable[..., Any], routing: Sequence[torch.Tensor]) -> None:
        """As `step`, with recorded experts by Megatron's `RouterReplay`.

        Args:
            routing: for each micro-batch `[L, n, K]` int64.
        """
        for replay in self._replays:
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        self._run(forward_backward, partial(self._forward_with_replay, iter(routing)))
        for replay in self._replays:
            replay.clear_indices()

    def _run(self, forward_backward: Callable[..., Any], forward: Callable[..., Any]) -> None:
        micro_batches, sequences, length = self._tokens_MBT.shape
        forward_backward(
            forward_step_func=forward, data_iterator=iter(self._tokens_MBT), model=self.ddp,
            num_microbatches=micro_batches, seq_length=length, micro_batch_size=sequences, forward_only=False,
        )  # fmt: skip

    def _forward(self, tokens: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
        tokens_BT = next(tokens)
        losses = model(tokens_BT, self._positions, self._mask, labels=tokens_BT.roll(-1, 1))
        return losses, lambda losses: (losses.mean(), {})

    def _forward_with_replay(
        self, routing: Iterator[torch.Tensor], tokens: Iterator[torch.Tensor], model: Any
    ) -> tuple[torch.Tensor, Any]:
        for replay, ids_NK in zip(self._replays, next(routing), strict=True):
            replay.set_target_indices(ids_NK)
        return self._forward(tokens, model)


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
