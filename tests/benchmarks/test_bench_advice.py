"""`python -m benchmarks.advice` at a small size."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from benchmarks import advice


@pytest.mark.nightly
def test_a_small_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = {
        "BARS": {48: 0.5}, "SCALED_PRESETS": ("qwen3-30b-math",), "SCALED_LAYERS": 1, "SCALED_RANKS": 4,
        "SCALED_SEQUENCES": 64, "MEAN_LENGTH": 128, "LONGEST": 256, "BUDGET": 512, "HELD_RANKS": (4,), "HELD_LAYERS": 1,
        "HELD_MICRO_STEPS": 4,
    }  # fmt: skip
    for name, value in small.items():
        monkeypatch.setattr(advice, name, value)
    figures = json.loads(json.dumps(advice.run_benchmark(draws=2, cases=2, cut_cases=1), allow_nan=False))
    assert [(row["sequences"], row["over"], row["draws"]) for row in figures["scaling"]["summary"]] == [
        (48, "static", 2), (48, "eplb", 2),
    ]  # fmt: skip
    held = figures["held_out"]
    assert held["cases"] == 2
    assert held["cut_verdicts"] == 2
    for row in held["by_case"]:
        assert row["behind"] == row["judged_s"][row["advised"]] / min(row["judged_s"].values()) - 1
    advice.print_figures(figures, Console(highlight=False))
    assert "Held out: within 2%" in capsys.readouterr().out


def test_errors_of_given_draws() -> None:
    rows = [{"true": 2.0, "found": found, "interval": [1.9, 2.1]} for found in (2.0, 2.1, 1.8)]
    rows[2]["interval"] = [1.7, 1.9]
    found = advice._errors(rows, 0.05)
    assert (found["within_bar"], found["inside"], found["draws"]) == (1 + (2.1 / 2 - 1 <= 0.05), 2, 3)
    assert found["worst_error"] == pytest.approx(0.1)
    assert found["bias"] == pytest.approx((0 + 0.05 - 0.1) / 3)
