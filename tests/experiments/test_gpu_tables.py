"""The tables of docs/gpu.md are those of the stored figures, and the estimates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.gpu_tables import blocks, estimate_layer, estimate_tables
from experiments.page_tables import tables_of_page
from trimtab.cluster import ClusterSpec, ModelSpec

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_has_the_stored_figures() -> None:
    figures = json.loads((DOCS / "benchmarks" / "gpu-h200.json").read_text())
    assert tables_of_page((DOCS / "gpu.md").read_text()) == blocks(figures)


def test_the_tables_of_the_page_are_the_estimates() -> None:
    assert estimate_tables() in (DOCS / "gpu.md").read_text()


def test_an_estimate_is_bytes_by_rate() -> None:
    """16 tokens with 2 rows each on 4 ranks: 24 rows leave the rank, of 10 values of 2 bytes."""
    model = ModelSpec("m", 8, 2, hidden_size=10, expert_width=5)
    cluster = ClusterSpec(
        4, 4, expert_flops=1e9, node_bytes_per_s=1e7, host_bytes_per_s=2e6, dispatch_node_bytes_per_s=48e5,
        dispatch_s=1e-3, tile_rows=1, copy_s=0.0, memory_bytes_per_s=1e12, expert_backward=2.0,
    )  # fmt: skip
    parts = estimate_layer(cluster, model, 16)
    assert parts["dispatch"] == parts["combine, backward"] == pytest.approx(1e-3 + 480 / 48e5)
    # An expert has 3 x 10 x 5 weights, a multiplication and an addition each; 32 rows, from 32 of all ranks' 128.
    assert parts["experts"] == pytest.approx(32 * 300 / 1e9, rel=1e-3)
    assert parts["experts, backward"] == pytest.approx(2 * parts["experts"])
