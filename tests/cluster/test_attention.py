"""Prices of attention that is not full: pairs counted one by one, and costs of layers that differ, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trimtab import ClusterSpec, ModelSpec, Schedule
from trimtab.cluster import AttentionLayers, StepCosts
from trimtab.cluster.attention import STATE_OPERATIONS, mean_attention, pairs_within_reach
from trimtab.cluster.operations import OperationCosts
from trimtab.planner.plan.step_times import dense_seconds

CLUSTER = ClusterSpec(4, 2, attention_flops=5e8, dense_flops=2e9, memory_bytes_per_s=1e9)
# Two MoE layers with full attention, one with a window and three with linear attention; a dense layer with a window.
MIXED = ModelSpec(
    "mixed", num_experts=8, top_k=2, hidden_size=100, expert_width=20, moe_layers=6, dense_layers=1, dense_width=50,
    attention=(
        AttentionLayers("full", 2, 0, parameters=5000, width=70),
        AttentionLayers("window", 1, 1, parameters=3000, width=40),
        AttentionLayers("linear", 3, 0, parameters=7000, state=900),
    ),
    reach=16,
)  # fmt: skip


@pytest.mark.parametrize("reach", [1, 2, 7, 100])
@pytest.mark.parametrize("chunked", [False, True])
def test_pairs_within_reach_equal_a_count_of_them(reach: int, chunked: bool) -> None:
    """Twice the keys of every query, less the query's own, so that t * t is the number without a limit."""
    lengths = np.array([0, 1, 2, 6, 7, 8, 50, 99, 100, 101, 333])
    counted = []
    for length in lengths.tolist():
        keys = [
            sum(1 for key in range(query + 1) if (key // reach == query // reach if chunked else query - key < reach))
            for query in range(length)
        ]
        # A query that meets a full window has no further key in reach: the pair behind it counts as half.
        before = [min(query % reach if chunked else query, reach) for query in range(length)]
        counted.append(sum(keys) + sum(before))
    assert pairs_within_reach(lengths, reach, chunked=chunked).tolist() == counted


def test_costs_are_the_mean_of_layers() -> None:
    costs = OperationCosts.of(CLUSTER, MIXED)
    passes_s = 20 * 100 * 2 / 1e9
    parameters, state = (2 * 5000 + 3000 + 3 * 7000) / 6, 3 * 900 / 6
    router_s = 2 * 100 * 8 / 2e9
    assert costs.token_s == pytest.approx(2 * parameters / 2e9 + 6 * state / 5e8 + passes_s + router_s)
    assert costs.square_s == pytest.approx(2 * 70 / 6 / 5e8)
    assert costs.reach_s == pytest.approx(40 / 6 / 5e8)
    assert costs.outer_square_s == 0
    assert costs.outer_reach_s == pytest.approx(40 / 5e8)
    assert costs.outer_token_s == pytest.approx(2 * 3000 / 2e9 + passes_s + 6 * 100 * 50 / 2e9)
    assert (costs.reach, costs.chunked) == (16, False)
    half = OperationCosts.of(CLUSTER, MIXED, moe_layers=3)
    assert half.reach_s == costs.reach_s
    assert half.outer_reach_s == pytest.approx(costs.outer_reach_s / 2)
    assert STATE_OPERATIONS == 6


def test_an_indexer_looks_at_all_pairs() -> None:
    blocks = (AttentionLayers("sparse", 4, 0, parameters=10, width=320, index_width=64),)
    assert mean_attention(blocks, 4, moe=True) == (10, 64, 320, 0)
    assert mean_attention(blocks, 0, moe=False) == (0, 0, 0, 0)


def test_layers_that_are_all_alike_cost_the_same_in_both_forms() -> None:
    plain = replace(MIXED, attention=(), reach=0, attention_parameters=5000, attention_width=70)
    listed = replace(plain, attention=(AttentionLayers("full", 6, 1, 5000, 70),), attention_parameters=0)
    assert OperationCosts.of(CLUSTER, plain) == OperationCosts.of(CLUSTER, listed)
    assert plain.parameters == listed.parameters
    assert StepCosts.of(CLUSTER, plain) == StepCosts.of(CLUSTER, listed)


def test_limited_attention_grows_linearly() -> None:
    """Two of six layers attend to all tokens, one to the last 16; two sequences, on ranks of their own."""
    costs = OperationCosts.of(CLUSTER, MIXED)
    tokens = np.array([10, 1000])
    schedule = Schedule(np.zeros(2, np.int32), np.arange(2, dtype=np.int32), np.zeros(1, np.int32), 2)
    inside_MR, _ = dense_seconds(schedule, tokens, costs)
    operations = tokens**2 * 2 * 70 / 6 + np.array([100 * 40 / 6, (1000**2 - 984**2) * 40 / 6])
    assert inside_MR[0] == pytest.approx(costs.layer_s + tokens * costs.token_s + operations / 5e8)


def test_long_sequences_cost_less_than_full_attention() -> None:
    """DeepSeek-V3.2 selects 2,048 tokens: no less work below, and a fraction of it far beyond."""
    full, sparse = (OperationCosts.of(CLUSTER, ModelSpec.named(name)) for name in ("deepseek-v3", "deepseek-v3.2"))
    lengths = np.array([2048, 131_072])
    dense = full.square_s * lengths**2
    limited = sparse.square_s * lengths**2 + sparse.reach_s * sparse.pairs_within_reach(lengths)
    index = 64 * 128 / (128 * 320)
    assert limited / dense == pytest.approx([1 + index, index + 1 - (1 - 2048 / 131_072) ** 2])
