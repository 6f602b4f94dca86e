"""The analysis page: complete, small, readable without scripts, interactive in a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.pages import array_of, values_of
from helpers.reports import some_analysis
from trimtab.report.html import page_of, write_html

SECTIONS = ("balance", "placements", "layers", "load", "sizes", "steps", "hot", "domains", "setting", "notes")


def grid_of(page: str, name: str) -> np.ndarray:
    grid = next(each for each in values_of(page)["grids"] if each["name"] == name)
    coded = array_of(page, grid["array"]).reshape(len(grid["planes"]), len(grid["rows"]), len(grid["columns"]))
    return np.where(coded > 0, (coded - 1) * grid["unit"], np.nan)


def test_the_page_has_all_sections_figures_and_grids() -> None:
    report = some_analysis()
    page, analysis = page_of(report), report.analysis
    found = [page.index(f'<section id="{name}"') for name in SECTIONS]
    assert found == sorted(found)
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    static = analysis.placements.strategies[0]
    for value in (analysis.total.max_vio.mean, static.max_over_mean_p99, analysis.layers[0].max_vio.worst):
        assert f">{value:.3f}<" in page
    assert grid_of(page, "vio")[0] == pytest.approx(analysis.max_over_mean_ML.T - 1, abs=6e-4)
    over = analysis.counts.counts_MLE / analysis.counts.counts_MLE.mean(axis=-1, keepdims=True)
    assert grid_of(page, "hot") == pytest.approx(over.transpose(1, 2, 0), abs=0.032)
    assert grid_of(page, "overlap")[0] == pytest.approx(analysis.overlap_DD, abs=6e-4)


@pytest.mark.parametrize(
    "odd",
    [
        {"ranks": 1},
        {"micro_steps": 1, "steps": 1},
        {"micro_steps": 2, "layers": 1, "domains": ("",)},
        {"experts": 15, "ranks": 5},
        {"experts": 1, "ranks": 1},
        {"without_load": 11},
    ],
)
def test_pages_of_small_and_unusual_traces_are_complete(odd: dict[str, Any]) -> None:
    report = some_analysis(**odd)
    page = page_of(report)
    # The histogram ends at the worst instance, or where bars can still be told apart.
    assert f">{max(report.analysis.total.max_over_mean.worst, 1.05):.2f}</text>" in page
    assert ("domains" in re.findall(r'<section id="(\w+)"', page)) == (odd.get("domains") != ("",))
    assert not re.search(r"\bnan\b|\binf\b", page.split("<script>")[0])


@pytest.mark.parametrize(("micro_steps", "layers", "ranks"), [(500, 48, 64), (32, 94, 128)])
def test_the_page_of_a_large_trace_is_below_2_mb(tmp_path: Path, micro_steps: int, layers: int, ranks: int) -> None:
    report = some_analysis(micro_steps=micro_steps, layers=layers, experts=128, ranks=ranks)
    write_html(report, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 2e6
    assert ("One micro-step in 4 is shown" in (tmp_path / "page.html").read_text()) == (micro_steps == 500)


def test_grids_react_to_keys_pointer_and_lists(show: Any) -> None:
    report = some_analysis()
    with show(report) as opened:
        page = opened.page
        for name in SECTIONS:
            assert page.locator(f"#{name} h2").is_visible()
        vio = '[data-grid="vio"] canvas'
        page.focus(vio)
        for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
            page.keyboard.press(key)
        expected = report.analysis.max_over_mean_ML[1, 1] - 1
        assert opened.text("#grid-vio-readout") == f"layer 2, micro-step 1 · {expected:.2f} max_vio"
        before = opened.pixels('[data-grid="hot"] canvas')
        page.select_option("#grid-hot", "0")
        page.select_option("#grid-hot", "1")
        assert opened.pixels('[data-grid="hot"] canvas') != before
        page.focus('[data-grid="hot"] canvas')
        page.keyboard.press("PageDown")
        assert page.input_value("#grid-hot") == "2"
        page.hover('[data-grid="overlap"] canvas', position={"x": 60, "y": 30})
        assert opened.text("#grid-overlap-readout").startswith("maths and maths · 100%")
        page.click("#layers tbody tr:nth-child(2) button")
        chosen = page.get_attribute("#layers tbody tr:nth-child(2) button", "data-layer")
        assert page.input_value("#layer") == chosen
