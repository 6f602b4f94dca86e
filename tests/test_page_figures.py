"""Figures of prose and tables are those of the stored results that the same section links to.

Generated tables have tests of their own. A figure with a unit has to round from some value of the files: that finds
pages that were not written anew, not a figure of another row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("experiments/*/README.md"))]
LEFT_OUT = re.compile(r"<!-- figures:.*?<!-- end -->|```.*?```", re.DOTALL)
LINK = re.compile(r"benchmarks/([\w-]+)\.json")
FIGURE = re.compile(r"(?<![\w.])([+-]?\d[\d,]*(?:\.\d+)?)\s?(ms|µs|us|MB|GB|s|%)(?!\w)")
FACTORS = {"ms": (1e3, 1.0), "s": (1.0, 1e-3), "µs": (1e6, 1.0), "us": (1e6, 1.0), "MB": (1e-6,), "GB": (1e-9,)}
MOST_VALUES = 3
"""Of a list that is not one of samples."""
NOT_MEASURED = {
    "results.md": {"95%"},
    "observe.md": {"24 MB", "120 MB", "1 GB"},
}
"""By page: levels of confidence, limits, and what is said of runs that are not stored."""


def values_of(stored: Any) -> Iterator[float]:
    """All but samples, of which some would be near any figure."""
    if isinstance(stored, list) and len(stored) > MOST_VALUES and all(isinstance(each, int | float) for each in stored):
        return
    if isinstance(stored, dict | list):
        for each in stored.values() if isinstance(stored, dict) else stored:
            yield from values_of(each)
    elif isinstance(stored, int | float) and not isinstance(stored, bool):
        yield float(stored)


def rounds_to(values: list[float], figure: str, unit: str) -> bool:
    """Whether one of the values is the figure, to its digits."""
    digits = figure.replace(",", "")
    half = 0.51 * 10.0 ** -len(digits.partition(".")[2])
    shown = abs(float(digits))
    if unit == "%":
        # A part, or a ratio as a change.
        return any(abs(abs(change) * 100 - shown) <= half for value in values for change in (value, value - 1))
    return any(abs(abs(value) * factor - shown) <= half for value in values for factor in FACTORS[unit])


def figures_of_page(page: Path) -> Iterator[tuple[str, bool]]:
    """Figures in sections that link to stored results, and whether these have them."""
    for section in re.split(r"(?m)^(?=## )", LEFT_OUT.sub("", page.read_text(encoding="utf-8"))):
        names = set(LINK.findall(section))
        stored = [json.loads((ROOT / "docs" / "benchmarks" / f"{name}.json").read_text()) for name in sorted(names)]
        values = list(values_of(stored))
        for figure, unit in FIGURE.findall(section) if stored else ():
            text = f"{figure}%" if unit == "%" else f"{figure} {unit}"
            if text not in NOT_MEASURED.get(page.name, ()):
                yield text, rounds_to(values, figure, unit)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_are_those_of_the_stored_results(page: Path) -> None:
    assert [text for text, is_stored in figures_of_page(page) if not is_stored] == []


def test_figures_are_found_and_compared_to_their_digits(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    linked = "[figures](benchmarks/observe-cpu.json)"
    made = "<!-- figures: x -->\n7.7 ms\n<!-- end -->"
    page.write_text(f"## One\n{linked} 9.6 ms, 7.7 ms, 98% and 27 MB.\n{made}\n## Other\n7.7 ms\n")
    assert list(figures_of_page(page)) == [("9.6 ms", True), ("7.7 ms", False), ("98%", True), ("27 MB", True)]
    assert any(list(figures_of_page(each)) for each in PAGES)
    assert rounds_to([1.4712], "1,471", "ms")
    assert not rounds_to([1.4735], "1,471", "ms")
    assert rounds_to([0.02048], "+2.0", "%")
    assert not rounds_to([0.02048], "2.1", "%")
