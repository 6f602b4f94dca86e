"""Prices of rows and replicas, worked out by hand for all passes of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trimtab import ClusterSpec, ModelSpec
from trimtab.cluster import StepCosts
from trimtab.planner.plan.plan_settings import prices_of
from trimtab.planner.schedule.time_packing import dense_rows

CLUSTER = ClusterSpec(
    8, 4, expert_flops=1e9, memory_bytes_per_s=1e9, node_bytes_per_s=4e8, network_bytes_per_s=1e8,
    dispatch_node_bytes_per_s=2e8, dispatch_network_bytes_per_s=5e7, dispatch_forwards=False, tile_rows=10,
    dense_backward=1.5, expert_backward=2.5,
)  # fmt: skip
# An expert has 3 * 100 * 20 = 6000 weights.
MODEL = ModelSpec("small", num_experts=8, top_k=2, hidden_size=100, expert_width=20)
FEMTOSECONDS = 1e15


@pytest.mark.parametrize(
    ("recompute", "checkpointing", "forwards"), [(False, False, 1), (True, False, 2), (True, True, 3)]
)
def test_prices_count_every_pass_of_a_step(recompute: bool, checkpointing: bool, forwards: int) -> None:
    costs = StepCosts.of(CLUSTER, MODEL, recompute=recompute, checkpointing=checkpointing)
    prices = prices_of(costs, CLUSTER, 0.25)
    # Products of a row, and its five passes over 120 values of two bytes.
    row_s = 2 * 6000 / 1e9 + 5 * 120 * 2 / 1e9
    assert prices.computed_row == pytest.approx((forwards + 2.5) * row_s * FEMTOSECONDS)
    # Dispatch and combine in every forward and in backward; the four ranks of a node share its rows to the other.
    assert prices.near_row == pytest.approx(2 * (forwards + 1) * 200 / 2e8 * FEMTOSECONDS)
    assert prices.far_row == pytest.approx(2 * (forwards + 1) * 200 / 5e7 / 4 * FEMTOSECONDS)
    # Weights in every forward and in backward, and the float32 gradient; a quarter of it exposed, a mean of 8 ranks.
    sent = (forwards + 1) * 12_000 + 24_000
    assert prices.near_replica == pytest.approx(0.25 * sent / 4e8 / 8 * FEMTOSECONDS)
    assert prices.far_replica == pytest.approx(0.25 * sent / 1e8 / 8 * FEMTOSECONDS)


def test_a_row_more_between_nodes_costs_a_transfer_if_the_token_has_no_other_there() -> None:
    rows, tokens = (
        prices_of(StepCosts.of(cluster, replace(MODEL, top_k=3)), cluster, 0.25)
        for cluster in (CLUSTER, replace(CLUSTER, dispatch_forwards=True))
    )
    # Neither of the two others is there in a quarter of all cases.
    assert tokens.far_row == pytest.approx(rows.far_row / 4)
    # Every rank has one of the experts, so no rows of a token share a rank.
    assert tokens.near_row == rows.near_row


def test_dense_rows_take_as_long_as_the_dense_parts() -> None:
    """Two forwards and a backward of each."""
    costs = StepCosts.of(CLUSTER, MODEL)
    lengths = np.array([0, 10, 500])
    row_s = (2 + 2.5) * (2 * 6000 / 1e9 + 5 * 120 * 2 / 1e9)
    dense_S = (2 + 1.5) * (costs.operations.token_s * lengths + costs.operations.square_s * lengths**2)
    assert dense_rows(lengths, costs).tolist() == np.rint(dense_S / row_s).tolist()
