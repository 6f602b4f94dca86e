"""The notebook runs from its dump to a figure, and has no stored outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "paper_figure.ipynb"

# It plans and simulates with three balancers.
pytestmark = pytest.mark.slow


def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
    names: dict[str, Any] = {}
    for place, text in enumerate(code):
        exec(compile(text, f"code cell {place}", "exec"), names)
    made = tmp_path / "out" / "notebook"
    assert {file.name for file in made.iterdir()} == {"rollout.jsonl", "imbalance.pdf", "cdf.pdf"}
    assert all(file.stat().st_size > 1000 for file in made.iterdir())
    assert list(names["balancers"].index) == ["static", "eplb", "trimtab", "balanced"]
    assert names["plan"].balance_after.mean < names["plan"].balance_before.mean
