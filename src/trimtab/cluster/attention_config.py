"""Sizes of a model's attention blocks, from the keys of a config."""

from __future__ import annotations

from collections import Counter
from typing import Any

from trimtab.cluster.attention import LIMITED, AttentionLayers, Kind
from trimtab.cluster.config_keys import ConfigKeys
from trimtab.errors import InputError

# Key of the most keys that a query attends to, by kind.
_REACH = {"window": "sliding_window", "chunk": "attention_chunk_size", "sparse": "index_topk"}
# Defaults of transformers where a config leaves a size out.
_MAMBA_STATE, _MAMBA_CONVOLUTION, _MAMBA_EXPANSION, _GROUPS, _GLOBAL_HEAD = 16, 4, 2, 8, 512


def attention_of(
    keys: ConfigKeys, hidden_size: int, kinds: list[Kind | None], moe_layers: tuple[int, ...], blocks_per_layer: int
) -> tuple[tuple[AttentionLayers, ...], int]:
    """Attention blocks by kind, in the order of the first layer of a kind, and the reach of limited ones, 0 without.

    Raises:
        InputError: if sizes are missing, or two kinds are limited.
    """
    with_experts = set(moe_layers)
    inside = Counter(kind for layer, kind in enumerate(kinds) if kind and layer in with_experts)
    outside = Counter(kind for layer, kind in enumerate(kinds) if kind and layer not in with_experts)
    found = list(dict.fromkeys(kind for kind in kinds if kind))
    limits = [_REACH[kind] for kind in found if kind in LIMITED]
    if len(limits) > 1:
        raise InputError(f"{keys.where}: {' and '.join(limits)} limit attention; expected one of them, or a null value")
    blocks = tuple(
        _block(keys, hidden_size, kind, blocks_per_layer * inside[kind], blocks_per_layer * outside[kind])
        for kind in found
    )
    return blocks, keys.count(*limits) if limits else 0


def _block(keys: ConfigKeys, hidden_size: int, kind: Kind, inside: int, outside: int) -> AttentionLayers:
    if kind == "linear":
        parameters, state = _linear(keys, hidden_size)
        return AttentionLayers(kind, inside, outside, parameters, state=state)
    parameters, width, *cache = softmax_attention(keys, hidden_size, kind)
    if kind != "sparse":
        return AttentionLayers(kind, inside, outside, parameters, width, 0, 0, *cache)
    heads, dim = keys.count("index_n_heads"), keys.count("index_head_dim")
    queries = keys.count("q_lora_rank", default=hidden_size) * heads * dim
    return AttentionLayers(
        kind, inside, outside, parameters + queries + hidden_size * (dim + heads), width, heads * dim, 0, *cache
    )


def softmax_attention(keys: ConfigKeys, hidden_size: int, kind: Kind) -> tuple[int, int, int, int]:
    """Weights of the projections, query heads * (key width + value width of a head), and width and heads of the
    cache."""
    heads = keys.count("num_attention_heads", default=0)
    if not heads:
        # Square projections.
        return 4 * hidden_size**2, 2 * hidden_size, 2 * hidden_size, 1
    kv_rank = keys.count("kv_lora_rank", default=0, least=0)
    if kv_rank:
        return _latent(keys, hidden_size, heads, kv_rank)
    head = keys.count("head_dim", default=0, least=0) or max(1, hidden_size // heads)
    kv_heads = keys.count("num_key_value_heads", default=heads)
    projections = 2
    if keys.is_of("gemma4") and kind == "full":
        # Heads of their own; one projection may make keys and values. transformers writes sizes by layer.
        of_layers = keys.get("per_layer_config")
        own: Any = next(iter(of_layers.values()), {}) if isinstance(of_layers, dict) else {}

        def of_layer(name: str, default: int) -> int:
            value = own.get(name) if isinstance(own, dict) else None
            return value if type(value) is int and value > 0 else default

        head = keys.count("global_head_dim", default=of_layer("head_dim", _GLOBAL_HEAD))
        if keys.get("attention_k_eq_v") is True:
            kv_heads = keys.count("num_global_key_value_heads", default=of_layer("num_key_value_heads", kv_heads))
            projections = 1
    other = keys.get("attention_other_setting")
    # Step-3.5 and 3.7: windows have heads of their own.
    window_heads = keys.count("num_sliding_attention_heads", default=heads)
    heads = window_heads if kind == "window" else heads
    if kind == "window" and isinstance(other, dict):
        heads = other.get("num_attention_heads", heads)
        kv_heads = other.get("num_attention_groups", kv_heads)
        head = other.get("head_dim", head)
    shared = keys.count("share_q_dim", default=0, least=0)
    if shared:
        # Step-3: queries of all heads through a common low rank, one key and value.
        query = hidden_size * shared + shared * heads * head
    else:
        gated = keys.is_of("qwen3_next") or keys.get("attn_output_gate") is True
        query = hidden_size * heads * head * (2 if gated else 1)
    parameters = query + hidden_size * (projections * kv_heads + heads) * head
    return parameters, 2 * heads * head, 2 * kv_heads * head, kv_heads


def _latent(keys: ConfigKeys, hidden_size: int, heads: int, kv_rank: int) -> tuple[int, int, int, int]:
    """Queries, keys and values through low ranks; the rotary part of a key is shared by all heads."""
    q_rank = keys.count("q_lora_rank", default=0, least=0)
    plain, rotary = keys.count("qk_nope_head_dim"), keys.count("qk_rope_head_dim")
    value = keys.count("v_head_dim")
    query = heads * (plain + rotary)
    parameters = q_rank * (hidden_size + query) if q_rank else hidden_size * query
    parameters += hidden_size * (kv_rank + rotary) + kv_rank * heads * (plain + value) + heads * value * hidden_size
    return parameters, heads * (plain + rotary + value), kv_rank + rotary, 0


def _linear(keys: ConfigKeys, hidden_size: int) -> tuple[int, int]:
    """Weights and values of the state of linear attention or a state-space layer."""
    if keys.get("linear_num_value_heads") is not None:
        return _delta_net(keys, hidden_size)
    if keys.get("mamba_num_heads") is not None:
        return _mamba_2(keys, hidden_size)
    if keys.get("attn_layer_period") is not None:
        return _mamba(keys, hidden_size)
    # MiniMax's lightning attention: queries, keys, values, gate and output.
    heads = keys.count("num_attention_heads")
    head = keys.count("head_dim", default=max(1, hidden_size // heads))
    if not keys.is_of("minimax"):
        keys.notes.append("layers of linear attention count as lightning attention with the heads of the others")
    return 5 * hidden_size * heads * head, heads * head**2


def _delta_net(keys: ConfigKeys, hidden_size: int) -> tuple[int, int]:
    """Gated DeltaNet of Qwen3-Next and Qwen3.5: queries, keys, values, gate, two a head, convolution, output."""
    key_heads, value_heads = keys.count("linear_num_key_heads"), keys.count("linear_num_value_heads")
    key_dim, value_dim = keys.count("linear_key_head_dim"), keys.count("linear_value_head_dim")
    all_keys, values = key_heads * key_dim, value_heads * value_dim
    mixed = 2 * all_keys + values
    parameters = hidden_size * (mixed + values + 2 * value_heads) + values * hidden_size
    return parameters + mixed * keys.count("linear_conv_kernel_dim", default=4), value_heads * key_dim * value_dim


def _mamba_2(keys: ConfigKeys, hidden_size: int) -> tuple[int, int]:
    """Mamba-2 of Nemotron-H."""
    heads = keys.count("mamba_num_heads")
    inner, state = heads * keys.count("mamba_head_dim"), keys.count("ssm_state_size")
    mixed = inner + 2 * keys.count("n_groups", default=_GROUPS) * state
    parameters = hidden_size * (inner + mixed + heads) + inner * hidden_size
    return parameters + mixed * keys.count("conv_kernel", default=_MAMBA_CONVOLUTION), inner * state


def _mamba(keys: ConfigKeys, hidden_size: int) -> tuple[int, int]:
    """Mamba of Jamba."""
    inner = hidden_size * keys.count("mamba_expand", default=_MAMBA_EXPANSION)
    state = keys.count("mamba_d_state", default=_MAMBA_STATE)
    rank = keys.get("mamba_dt_rank")
    rank = -(-hidden_size // 16) if rank in (None, "auto") else keys.count("mamba_dt_rank")
    # In, convolution, input-dependent parameters, step widths, decay, out.
    convolution = keys.count("mamba_d_conv", default=_MAMBA_CONVOLUTION)
    parameters = 3 * hidden_size * inner + inner * (convolution + rank + 2 * state + rank + state)
    return parameters, inner * state
