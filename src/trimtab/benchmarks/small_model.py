"""The small MoE that benches of the runtime and of recording build: Qwen3-MoE, but for its sizes."""

from __future__ import annotations

from typing import Any


def small_config(*, layers: int, hidden: int, width: int, experts: int, top_k: int) -> dict[str, Any]:
    """Of the model, as a `config.json` would have it; `width` is that of an expert."""
    return {
        "model_type": "qwen3_moe",
        "vocab_size": 1024,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "moe_intermediate_size": width,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "dtype": "float32",
    }
