"""Costs of operations, worked out by hand for a small model on a slow cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trimtab import ClusterSpec
from trimtab.cluster import ModelSpec
from trimtab.cluster.operations import OperationCosts

CLUSTER = ClusterSpec(
    4, 2, expert_flops=1e9, dense_flops=2e9, attention_flops=5e8, memory_bytes_per_s=1e9, node_bytes_per_s=4e8,
    network_bytes_per_s=1e8, host_bytes_per_s=5e7, dispatch_node_bytes_per_s=3e8, dispatch_network_bytes_per_s=9e7,
    dispatch_forwards=False, tile_rows=10, copy_s=1e-3, layer_s=2e-3, dispatch_s=3e-3, dense_backward=1.9,
    expert_backward=2.1,
)  # fmt: skip
# An expert has 3 * 100 * 20 = 6000 weights.
MODEL = ModelSpec(
    "small", num_experts=8, top_k=2, hidden_size=100, expert_width=20, moe_layers=3, dense_layers=1, dense_width=50,
    shared_width=30, attention_parameters=5000, attention_width=70, vocab_size=1000,
)  # fmt: skip


def test_costs_are_operations_and_bytes_divided_by_rates() -> None:
    costs = OperationCosts.of(CLUSTER, MODEL)
    attention_s = 2 * 5000 / 2e9 + 20 * 100 * 2 / 1e9
    assert costs.token_s == pytest.approx(attention_s + 2 * (3 * 100 * 30 + 100 * 8) / 2e9)
    assert costs.square_s == pytest.approx(70 / 5e8)
    assert (costs.layer_s, costs.outer_s) == (2e-3, 2e-3)
    head_s = 2 * 100 * 1000 / 2e9 + 12 * 1000 / 1e9
    assert costs.outer_token_s == pytest.approx(attention_s + 6 * 100 * 50 / 2e9 + head_s)
    assert costs.outer_square_s == pytest.approx(70 / 5e8)
    assert (costs.tile_rows, costs.copy_s, costs.dispatch_s) == (10, 1e-3, 3e-3)
    assert costs.tile_s == pytest.approx(10 * 2 * 6000 / 1e9)
    assert costs.weights_s == pytest.approx(12000 / 1e9)
    assert costs.row_s == pytest.approx(5 * 120 * 2 / 1e9)
    assert (costs.dense_backward, costs.expert_backward) == (1.9, 2.1)
    assert costs.near_row_s == pytest.approx(200 / 3e8)
    assert costs.far_row_s == pytest.approx(200 / 9e7)
    assert costs.near_weights_s == pytest.approx(12000 / 4e8)
    assert costs.far_weights_s == pytest.approx(12000 / 1e8)
    assert costs.host_weights_s == pytest.approx(12000 / 5e7)
    assert costs.near_gradient_s == pytest.approx(24000 / 4e8)
    assert costs.far_gradient_s == pytest.approx(24000 / 1e8)
    # Weights in bfloat16; master copy and two moments in float32.
    assert costs.near_state_s == pytest.approx(6000 * 14 / 4e8)
    assert costs.far_state_s == pytest.approx(6000 * 14 / 1e8)
    assert costs.near_spare == pytest.approx(0.25)
    assert costs.far_spare == pytest.approx(0.1)
    assert costs.hop_row_s == pytest.approx(200 / 4e8)


def test_selective_recomputation_reads_and_writes_again_in_backward() -> None:
    """Two norms of a token, as wide as it; gate times up of shared experts and of each row, as wide as an expert."""
    costs = OperationCosts.of(CLUSTER, MODEL, checkpointing="selective")
    assert costs.token_s * (costs.dense_backward - 1.9) == pytest.approx((2 * 2 * 100 + 3 * 30) * 2 / 1e9)
    row_s = 2 * 6000 / 1e9 + costs.row_s
    assert row_s * (costs.expert_backward - 2.1) == pytest.approx(3 * 20 * 2 / 1e9)
    assert costs._replace(dense_backward=1.9, expert_backward=2.1) == OperationCosts.of(CLUSTER, MODEL)


def test_the_optimizer_has_its_share_of_parameters() -> None:
    dense = MODEL.dense_parameters
    for groups in (1, 3):
        costs = OperationCosts.of(CLUSTER, MODEL, groups=groups)
        mine = 3 * 8 * 6000 / 4 + dense / (4 * groups)
        assert costs.optimizer_s == pytest.approx(30 * mine / 1e9)
        # Gradients in float32 come together, weights in bfloat16 go out, over the network.
        others = (4 * groups - 1) / (4 * groups)
        experts_elsewhere = 3 * 8 * 6000 / 4 * (groups - 1) / groups
        assert costs.reduce_s == pytest.approx((4 + 2) * (dense * others + experts_elsewhere) / 1e8)
    one_node = OperationCosts.of(replace(CLUSTER, ranks_per_node=4), MODEL)
    assert one_node.reduce_s == pytest.approx(6 * dense * 3 / 4 / 4e8)
    assert OperationCosts.of(replace(CLUSTER, ranks=1, ranks_per_node=1), MODEL).reduce_s == 0


def test_parts_outside_moe_layers_scale_with_the_layers() -> None:
    whole, part = OperationCosts.of(CLUSTER, MODEL), OperationCosts.of(CLUSTER, MODEL, moe_layers=1)
    for name in ("outer_s", "outer_token_s", "outer_square_s", "optimizer_s", "reduce_s"):
        assert getattr(part, name) == pytest.approx(getattr(whole, name) / 3)
    for name in ("token_s", "tile_s", "near_row_s", "far_weights_s", "layer_s"):
        assert getattr(part, name) == getattr(whole, name)


def test_with_forwarding_rows_of_a_token_share_a_transfer() -> None:
    # Of two experts one is on the other's rank in a quarter of all cases, and on its node in half of them.
    costs = OperationCosts.of(replace(CLUSTER, dispatch_forwards=True), MODEL)
    assert (costs.near_row_s, costs.far_row_s) == pytest.approx((200 / 3e8, 200 / 9e7))
    assert costs.even_near_row_s == pytest.approx(200 / 3e8 * (2 - 1 / 4) / 2)
    assert costs.even_far_row_s == pytest.approx(200 / 9e7 * (2 - 1 / 2) / 2)


def test_rows_and_experts_are_as_wide_as_their_projection() -> None:
    """Nemotron 3 Super: tokens are projected to a narrower width before dispatch."""
    costs = OperationCosts.of(CLUSTER, replace(MODEL, latent_size=25))
    assert costs.near_row_s == pytest.approx(50 / 3e8)
    assert costs.hop_row_s == pytest.approx(50 / 4e8)
    assert costs.row_s == pytest.approx(5 * 45 * 2 / 1e9)
    assert costs.tile_s == pytest.approx(10 * 2 * 1500 / 1e9)
    assert costs.far_weights_s == pytest.approx(3000 / 1e8)
    attention_s = 2 * 5000 / 2e9 + 20 * 100 * 2 / 1e9
    assert costs.token_s == pytest.approx(attention_s + 2 * (3 * 100 * 30 + 2 * 100 * 25 + 100 * 8) / 2e9)


def test_a_missing_link_has_no_costs() -> None:
    costs = OperationCosts.of(replace(CLUSTER, node_bytes_per_s=0), MODEL)
    assert (costs.near_weights_s, costs.near_spare) == (0, 0)
    # Through host memory instead.
    assert costs.near_gradient_s == pytest.approx(24000 / 5e7)
    assert costs.near_state_s == pytest.approx(84000 / 5e7)
    assert costs.hop_row_s == pytest.approx(200 / 5e7)
    assert OperationCosts.of(replace(CLUSTER, host_bytes_per_s=0), MODEL).host_weights_s == 0
    # All-to-alls as fast as the link leave nothing.
    assert OperationCosts.of(replace(CLUSTER, dispatch_node_bytes_per_s=5e8), MODEL).near_spare == 0


def test_unknown_sizes_count_as_square_projections() -> None:
    unknown = replace(MODEL, attention_parameters=0, attention_width=0)
    square = replace(MODEL, attention_parameters=4 * 100**2, attention_width=200)
    assert OperationCosts.of(CLUSTER, unknown) == OperationCosts.of(CLUSTER, square)
