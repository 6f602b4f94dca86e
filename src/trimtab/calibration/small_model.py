"""The small Qwen3-MoE that calibration and the runtime's benchmark measure on a CPU by default."""

from __future__ import annotations

from typing import Any

LAYERS, HIDDEN, WIDTH, EXPERTS, TOP_K = 4, 256, 512, 32, 4
TOKENS, SEQUENCE_LENGTH = 2048, 128


def small_config(
    *, layers: int = LAYERS, hidden: int = HIDDEN, width: int = WIDTH, experts: int = EXPERTS, top_k: int = TOP_K
) -> dict[str, Any]:
    """The model's config, as in a `config.json`. `width` is the intermediate size of an expert."""
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
