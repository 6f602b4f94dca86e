"""Start, results and simulator show the stored figures of simulated steps, and a small run gives all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import simulated
from experiments.page_tables import tables_of_page

ROOT = Path(__file__).parents[2]


def test_the_pages_show_the_stored_figures() -> None:
    figures = json.loads((ROOT / "docs" / "benchmarks" / "simulated.json").read_text())
    blocks = simulated.blocks(figures)
    shown = {
        name: text
        for page in (simulated.START, simulated.RESULTS, simulated.SIMULATOR)
        for name, text in tables_of_page(page.read_text(encoding="utf-8")).items()
    }
    assert {name: shown[name] for name in blocks} == blocks
    assert (figures["size"], figures["num_steps"]) == (simulated.SIZE, simulated.TRACES)
    assert figures["step"] == simulated.STEP


@pytest.mark.nightly
def test_a_small_run_gives_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    size: dict[str, Any] = {"num_sequences": 32, "mean_length": 24, "max_length": 40, "num_layers": 1}
    monkeypatch.setattr(simulated, "STEP", simulated.STEP | {"micro_steps": 1})
    sweep = {"ranks": [8, 16], "slots": [1], "micro_steps": [1]}
    figures = json.loads(json.dumps(simulated.simulate_all(dict.fromkeys(simulated.TRACES, 2), size, sweep)))
    skewed = next(iter(figures["steps"].values()))
    tokens, rows = (skewed[sent]["policies"]["static"]["step_time_s"] for sent in ("tokens", "rows"))
    assert tokens < rows
    blocks = simulated.blocks(figures)
    assert f"{tokens:.2f} s" in blocks["gain"]
    assert len(blocks["kinds"].splitlines()) == 2 + len(simulated.KINDS)
    assert len(figures["sweep"]) == 2
    assert "as priced" in blocks["sensitivity-rows"]
