"""Figures are stated once: docs, docstrings, JSON and metrics have those of the results."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from experiments.site.reference_pages import reference_pages
from trimtab.api.plan_result import PlanResult
from trimtab.figures import Figure, by_key, computed, described_figures, figures_of, measured, with_documented_figures
from trimtab.runtime import PlanReport


@pytest.mark.parametrize("kind", [PlanReport, PlanResult])
def test_the_reference_has_the_figures(kind: type) -> None:
    page = reference_pages()["reference/metrics.md"]
    for name, (unit, text, key) in described_figures(kind).items():
        assert f"| `{name}` | {unit} | {text} | {f'`{key}`' if key else ''} |" in page
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
