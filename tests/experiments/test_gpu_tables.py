"""The tables of docs/gpu.md are those of the stored figures, and the estimates."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.gpu_tables import blocks, estimate_tables
from experiments.page_tables import tables_of_page

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_has_the_stored_figures() -> None:
    figures = json.loads((DOCS / "benchmarks" / "gpu-h200.json").read_text())
    assert tables_of_page((DOCS / "gpu.md").read_text()) == blocks(figures)


def test_the_tables_of_the_page_are_the_estimates() -> None:
    assert estimate_tables() in (DOCS / "gpu.md").read_text()
