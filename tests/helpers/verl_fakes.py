"""What needs a GPU or files in verl's Megatron engine, replaced.

CUDA; Transformer Engine (attention is a loop over packed sequences, experts are `SequentialMLP`, norms are LayerNorms);
weights from and to files; `HFModelConfig`; checkpoints.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from examples.megatron_on_cpu import use_cpu

EXPERTS, TOP_K, LAYERS, VOCABULARY = 8, 2, 2, 64


@cache
def prepare() -> None:
    """Replaces what needs a GPU, for good. Once in a process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Megatron compiles some functions of routers for CUDA.
    torch.compiler.set_stance("force_eager")
    use_cpu()
    from mbridge.models.qwen3moe import Qwen3MoEBridge
    from verl.utils.megatron import router_replay_utils
    from verl.workers.engine.megatron import transformer_impl

    cuda: Any = torch.cuda
    cuda.mem_get_info = lambda *_: (1 << 30, 1 << 30)
    router_replay_utils.device_name = "cpu"
    transformer_impl.log_gpu_memory_usage = lambda *_, **__: None
    for name, method in {
        "_get_transformer_layer_spec": _layer_spec, "load_weights": _load_weights, "export_weights": _export_weights,
    }.items():  # fmt: skip
        setattr(Qwen3MoEBridge, name, method)


def model_config() -> Any:
    """In place of verl's `HFModelConfig`, which reads files."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, moe_intermediate_size=24,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, max_position_embeddings=512, tie_word_embeddings=False, router_aux_loss_coef=0.0,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    config.rope_theta = 10000.0
    return SimpleNamespace(
        model_type="language_model", hf_config=config, local_path=None, trust_remote_code=False, lora={},
        share_embeddings_and_output_weights=False, mtp=SimpleNamespace(enable=False, enable_train=False),
        get=lambda _name, default=None: default, architectures=["Qwen3MoeForCausalLM"],
        tokenizer=SimpleNamespace(pad_token_id=0), get_processor=lambda: None,
    )  # fmt: skip


class CheckpointManager:
    """In place of verl's: keeps the model's `state_dict()`, which has experts by position."""

    def __init__(self, *, model: Any, optimizer: Any, **_options: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.states: list[dict[str, torch.Tensor]] = []

    def save_checkpoint(self, **_options: Any) -> None:
        """Keeps a copy."""
        self.states.append({name: value.clone() for name, value in _tensors(self.model[0].state_dict())})

    def load_checkpoint(self, **_options: Any) -> None:
        """Gives the model the last copy."""
        for name, value in _tensors(self.model[0].state_dict()):
            value.copy_(self.states[-1][name])


def _tensors(state: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, value) for name, value in state.items() if isinstance(value, torch.Tensor))


def _layer_spec(bridge: Any, vp_stage: int | None = None) -> Any:
    """The layers of the bridge without Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    bridge.has_vp_stage = True
    spec = get_gpt_decoder_block_spec(
        bridge.config, use_transformer_engine=False, normalization="LayerNorm", vp_stage=vp_stage
    )
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = packed_attention()
    return spec


@cache
def packed_attention() -> Any:
    """Causal attention within each packed sequence, without Transformer Engine."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class PackedAttention(DotProductAttention):
        def forward(
            self, query: Any, key: Any, value: Any, _mask: Any, attn_mask_type: Any = None, attention_bias: Any = None,
            packed_seq_params: Any = None,
        ) -> Any:  # fmt: skip
            del attn_mask_type, attention_bias
            repeats = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
            ends = getattr(packed_seq_params, "cu_seqlens_q_padded", None)
            ends = (packed_seq_params.cu_seqlens_q if ends is None else ends).tolist()
            outputs = []
            for start, end in pairwise(ends):
                q, k, v = (each[start:end].transpose(0, 1) for each in (query, key, value))
                scores = (q @ k.transpose(1, 2)).float() * self.softmax_scale
                later = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
                weights = scores.masked_fill(later, float("-inf")).softmax(-1).to(v.dtype)
                outputs.append((weights @ v).transpose(0, 1))
            return torch.cat(outputs).reshape(len(query), -1)

    return PackedAttention


def _load_weights(_bridge: Any, models: Any, _path: Any) -> None:
    """Random weights, the same for an expert on whichever rank it is."""
    from megatron.core import parallel_state

    torch.manual_seed(11)
    for model in models:
        for name, parameter in sorted(model.named_parameters()):
            drawn = torch.randn(parameter.shape)
            if ".experts." in name:
                others = parallel_state.get_expert_model_parallel_world_size() - 1
                all_ranks = [drawn, *(torch.randn(parameter.shape) for _ in range(others))]
                drawn = all_ranks[parallel_state.get_expert_model_parallel_rank()]
            scale = 0.1 if parameter.ndim > 1 else 0.02
            is_scale = "norm" in name and name.endswith("weight")
            parameter.data.copy_(1 + 0.1 * drawn if is_scale else scale * drawn)


def _export_weights(bridge: Any, models: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """As mbridge's: an expert of every rank is gathered, and has a number by its rank and place."""
    from megatron.core import parallel_state
    from verl.utils.megatron_utils import unwrap_model

    group = parallel_state.get_expert_model_parallel_group()
    local_experts = bridge.config.num_moe_experts // group.size()
    for model in models:
        for name, parameter in unwrap_model(model).named_parameters():
            if ".local_experts." not in name:
                yield name, parameter.detach().clone()
                continue
            parts = [torch.empty_like(parameter) for _ in range(group.size())]
            dist.all_gather(parts, parameter.detach().contiguous(), group=group)
            head, tail = name.split(".local_experts.")
            place, rest = tail.split(".", 1)
            for rank, part in enumerate(parts):
                yield f"{head}.local_experts.{rank * local_experts + int(place)}.{rest}", part
