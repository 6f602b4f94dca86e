"""Figures are stated once: docs, docstrings, JSON and metrics have those of the results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from trimtab.api.plan import PlanResult
from trimtab.figures import Figure, by_key, computed, described_figures, figures_of, measured, with_documented_figures
from trimtab.runtime import PlanReport

DOCS = Path(__file__).parents[1] / "docs"


def table_of(kind: type, keys: str) -> str:
    """The figures of a class of results as a table of the docs."""
    rows = [
        f"| `{name}` | {unit} | {text} | {f'`{key}`' if key else ''} |"
        for name, (unit, text, key) in described_figures(kind).items()
    ]
    return "\n".join([f"| figure | unit | meaning | {keys} |", "|---|---|---|---|", *rows])


@pytest.mark.parametrize(
    ("kind", "page", "keys"), [(PlanReport, "runtime.md", "in `metrics.jsonl`"), (PlanResult, "planning.md", "in JSON")]
)
def test_docs_have_the_figures(kind: type, page: str, keys: str) -> None:
    assert table_of(kind, keys) in (DOCS / page).read_text()
    for name, (_, text, _) in described_figures(kind).items():
        assert text, name
        assert hasattr(kind, name) or f"{name}: {text}" in (kind.__doc__ or "")


def test_figures_of_a_result() -> None:
    @with_documented_figures
    @dataclass(frozen=True)
    class Result:
        """A result."""

        rows: int = measured("of the busiest rank", "rows", key="rows")
        note: str = measured("anything")

        @computed("s", key="time_s")
        def seconds(self) -> float:
            """Time of
            all rows."""
            return 0.5 * self.rows

    result = Result(4, "x")
    assert figures_of(result) == [
        Figure("rows", 4, "rows", "of the busiest rank", "rows"),
        Figure("note", "x", "", "anything", ""),
        Figure("seconds", 2.0, "s", "Time of all rows.", "time_s"),
    ]
    assert by_key(result) == {"rows": 4, "time_s": 2.0}
    assert "    rows: of the busiest rank" in (Result.__doc__ or "")
