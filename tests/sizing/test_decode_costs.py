"""Costs of decode by hand, and what caches of published models hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trimtab.cluster import AttentionLayers, ClusterSpec, ModelSpec
from trimtab.sizing.decode_costs import DecodeCosts, exchange_s

MODEL = ModelSpec(
    "small", num_experts=4, top_k=2, hidden_size=100, expert_width=10, moe_layers=3, vocab_size=1000,
    attention_parameters=30_000, attention_width=200, cache_width=40, cache_heads=2, attention_heads=10,
)  # fmt: skip
# Everything but memory takes no time.
CLUSTER = ClusterSpec(
    8, 4, memory_bytes_per_s=1e6, dense_flops=1e18, attention_flops=1e18, layer_s=0.0, dispatch_s=1e-3,
    node_bytes_per_s=1e15, dispatch_network_bytes_per_s=1e6, dispatch_node_bytes_per_s=1e6,
)  # fmt: skip


def test_reads_of_cache_and_weights_by_hand() -> None:
    costs = DecodeCosts(CLUSTER, MODEL, context=50)
    # Weights of attention and router in two bytes; a cache of 40 values for each of 50 tokens; 20 passes of 100 values.
    weights, cache, passes = 2 * (30_000 + 400), 2 * 40 * 50, 2 * 20 * 100
    assert costs.attention_s(7, 1) == pytest.approx((weights + 7 * (cache + passes)) / 1e6)
    # Two ranks have half of the weights each, and a head of the two each; four ranks have copies of the heads.
    assert costs.attention_s(7, 2) == pytest.approx((weights / 2 + 7 * (cache / 2 + passes)) / 1e6 + 1e-3, rel=1e-6)
    assert costs.attention_s(7, 4) == pytest.approx((weights / 4 + 7 * (cache / 2 + passes)) / 1e6 + 1e-3, rel=1e-6)
    # Output head: its weights, and float32 logits three times.
    assert costs.outer_s(7, 1) == pytest.approx((2 * 100_000 + 7 * 12 * 1000) / 1e6)
    # All layers' attention, routers, embedding and head; the cache of three layers.
    weights = 2 * (3 * 30_400 + 2 * 100_000)
    assert costs.attention_bytes(7, 1) == weights + 7 * 3 * cache
    assert costs.attention_bytes(7, 4) == weights / 4 + 7 * 3 * cache / 2
    assert costs.expert_bytes(5) == 5 * 3 * 2 * 3 * 100 * 10


def test_compute_counts_where_it_takes_longer() -> None:
    slow = replace(CLUSTER, memory_bytes_per_s=1e15, dense_flops=1e6, attention_flops=1e6)
    # Two operations for each weight, and for each value that is multiplied: query heads, keys and values of 50 tokens.
    assert DecodeCosts(slow, MODEL, 50).attention_s(7, 1) == pytest.approx(7 * 2 * (30_400 + 200 * 50) / 1e6)
    slow = replace(slow, attention_flops=5e6)
    assert DecodeCosts(slow, MODEL, 50).attention_s(7, 1) == pytest.approx(7 * 2 * (30_400 + 200 * 50 / 5) / 1e6)
    # All heads multiply the cache of latent vectors, in dense products.
    latent = replace(MODEL, cache_heads=0)
    assert DecodeCosts(slow, latent, 50).attention_s(7, 1) == pytest.approx(7 * 2 * (30_400 + 2 * 10 * 40 * 50) / 1e6)


def test_windows_and_states_are_read_in_place_of_all_tokens() -> None:
    blocks = (
        AttentionLayers("window", 2, 0, 30_000, 200, cache_width=40, cache_heads=2),
        AttentionLayers("linear", 1, 0, 30_000, state=900),
    )
    costs = DecodeCosts(CLUSTER, replace(MODEL, attention=blocks, reach=8), 50)
    read = 2 * (2 * 40 * 8 + 2 * 900) / 3
    assert costs.attention_s(7, 1) == pytest.approx((2 * 30_400 + 7 * (read + 2 * 20 * 100)) / 1e6)
    assert costs.attention_bytes(1, 1) - costs.attention_bytes(0, 1) == pytest.approx(2 * (2 * 40 * 8 + 900))


def test_exchanges_by_hand() -> None:
    plain = DecodeCosts(replace(CLUSTER, dispatch_forwards=False), MODEL, 50)
    # Two rows of 200 bytes for each of 6 tokens, over the links of the one sender, or of the two receivers' node.
    assert exchange_s(plain, plain, np.array(6.0), 1, 2) == pytest.approx(1e-3 + 6 * 2 * 200 / 1e6)
    other = DecodeCosts(replace(CLUSTER, dispatch_forwards=False, name="other"), MODEL, 50)
    assert exchange_s(plain, other, np.array(6.0), 3, 2) == pytest.approx(1e-3 + 6 * 2 * 200 / 2e6)
    # Colocated on one node: 3 of 4 rows leave a rank.
    assert exchange_s(plain, plain, np.array(8.0), 4, 0) == pytest.approx(1e-3 + 8 * 2 * 200 * 3 / 4 / 4e6)


@pytest.mark.parametrize(
    ("name", "width", "heads"), [("qwen3-30b-a3b", 1024, 4), ("deepseek-v3", 576, 0), ("mixtral-8x7b", 2048, 8)]
)
def test_caches_of_published_models(name: str, width: int, heads: int) -> None:
    """DeepSeek-V3: 512 latent values and 64 of the rotary key, the 70 KB a token of its report's 61 layers."""
    (block,) = ModelSpec.named(name).attention_blocks
    assert (block.cache_width, block.cache_heads) == (width, heads)
