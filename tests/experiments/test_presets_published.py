"""Presets match the published skew that they are named after, and the page shows the stored figures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness import run_command
from experiments.page_tables import markdown_table, tables_of_page
from experiments.presets.__main__ import RESULTS, least_gains, tables
from experiments.presets.measure import as_stated, common_part, measure
from experiments.presets.published_skew import PUBLISHED, PublishedSkew
from experiments.presets.skew_measures import Sample, busier_half, concentration, gini, persistence, rank_loads
from helpers.examples import examples, nightly_except
from trimtab.trace import PRESETS, RoutingTrace, synthesize_preset

ROOT = Path(__file__).parents[2]
DOCS, PAGE = ROOT / "docs", ROOT / "experiments" / "presets" / "README.md"
# Others than the stored figures' seeds, and fewer tokens.
SEEDS, TOKENS = examples(short=(11,), long=(11, 12, 13, 14, 15)), 1 << 17


@pytest.mark.longer
@pytest.mark.slow
@pytest.mark.parametrize(
    "preset",
    nightly_except(
        sorted({row.preset for row in PUBLISHED}),
        "deepseek-moe-16b-text", "glm-4.7-flash-math", "gpt-oss-20b-reasoning", "nemotron-3-nano-text",
    ),
)  # fmt: skip
def test_a_preset_has_the_skew_it_is_named_after(preset: str) -> None:
    # Eight groups of four ranks with 16,384 tokens each need more tokens.
    tokens = 4 * TOKENS if preset == "mixtral-8x7b-text" else TOKENS
    by_seed = [measure(preset, seed, tokens) for seed in SEEDS]
    for each in zip(*by_seed, strict=True):
        row, values = each[0][0], [value for _, value in each]
        assert as_stated(row, values), f"{row.measure}: {values}, published {row.published}"


def test_every_model_preset_has_a_published_figure() -> None:
    matched = {row.preset for row in PUBLISHED if row.matches}
    assert matched == PRESETS.keys() - {"drift", "spike", "uniform"}
    assert all(row.source and row.low < row.high for row in PUBLISHED)


def test_the_page_shows_the_stored_figures() -> None:
    figures = json.loads((DOCS / "benchmarks" / "presets.json").read_text())
    written = [(row["preset"], row["measure"]) for row in figures["rows"]]
    assert written == [(row.preset, row.measure) for row in PUBLISHED]
    assert all(row["as_stated"] for row in figures["rows"])
    assert len(figures["settings"]["seeds"]) == len(figures["rows"][0]["values"]) == 10
    page = PAGE.read_text()
    assert tables_of_page(page) == {name: markdown_table(*table) for name, table in tables(figures).items()}
    assert tables_of_page(RESULTS.read_text())["least"] == least_gains(figures)
    for preset in PRESETS.values():
        row = page[page.index(f"| `{preset.name}` |") :]
        assert f"| {preset.num_experts}, {preset.top_k}, {preset.moe_layers} |" in row


def test_a_figure_outside_its_range_is_not_as_stated() -> None:
    inside = PublishedSkew("uniform", "gini", "", 0.1, 0.2, "")
    assert as_stated(inside, [0.0, 0.15, 0.9])
    assert not as_stated(inside, [0.0, 0.25, 0.9])
    outside = PublishedSkew("uniform", "gini", "", 0.1, 0.2, "", matches=False)
    assert as_stated(outside, [0.25])
    assert not as_stated(outside, [0.15])


def test_gini_is_the_mean_absolute_difference() -> None:
    loads = np.random.default_rng(0).integers(0, 100, (5, 12))
    plain = [np.abs(load[:, None] - load).mean() / (2 * load.mean()) for load in loads]
    assert np.allclose(gini(loads), plain)
    assert gini(np.array([3, 3, 3])) == 0


def test_concentration_and_busier_half_of_given_loads() -> None:
    assert concentration(np.array([7, 7, 7, 7])) == pytest.approx(0)
    assert concentration(np.array([0, 9, 0, 0])) == 1
    assert concentration(np.array([5, 5, 0, 0])) == pytest.approx(1 - math.log(2) / math.log(4))
    assert busier_half(np.array([[1, 2, 3, 4], [4, 4, 1, 1]])).tolist() == [0.7, 0.8]


def _trace(preset: str = "qwen3-30b-math") -> RoutingTrace:
    return synthesize_preset(
        PRESETS[preset], num_sequences=64, mean_length=64, max_length=128, num_layers=3, num_experts=16, top_k=4,
        num_steps=2,
    )  # fmt: skip


def test_rank_loads_are_sums_over_sequences() -> None:
    trace = _trace().select(np.arange(64))
    row = PublishedSkew("", "", "", 0, 1, "", ranks=4, groups=2, tokens_per_rank=trace.num_tokens // 24)
    loads_MLR = rank_loads(trace, row)
    assert loads_MLR.shape == (3, 3, 8)
    assert np.all(loads_MLR.sum(axis=(0, 2)) == trace.num_tokens * 4)
    first = [s for s in range(64) if trace.sequence_starts[s] * 6 < trace.num_tokens]
    ids = np.concatenate([trace.sequence(s)[:, 1] for s in first])
    assert loads_MLR[0, 1, :4].tolist() == np.bincount(ids.ravel() // 4, minlength=4).tolist()


def test_persistence_is_1_for_equal_micro_steps_and_0_for_opposite_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, row = Sample(_trace()), PublishedSkew("", "", "", 0, 1, "")
    loads = np.array([[[30, 10]], [[30, 10]]])
    monkeypatch.setattr("experiments.presets.skew_measures.rank_loads", lambda trace, row: loads)
    assert persistence(sample, row) == 1
    loads[1] = loads[1, :, ::-1]
    assert persistence(sample, row) == 0


def test_the_command_refuses_a_missing_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_command("experiments.presets.__main__", ["--page", str(tmp_path / "none.md")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_the_common_part_of_loads_is_that_of_their_variance() -> None:
    rng = np.random.default_rng(0)
    common_LR, own_MLR = rng.normal(size=(4, 50)), rng.normal(size=(200, 4, 50))
    for part in (0.0, 0.5, 0.9, 1.0):
        loads_MLR = 1000 * (1 + 0.1 * (part**0.5 * common_LR + (1 - part) ** 0.5 * own_MLR))
        assert common_part(loads_MLR) == pytest.approx(part, abs=0.1)
