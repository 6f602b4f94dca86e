"""README and pages have the tables that the stored figures give."""

from __future__ import annotations

import pytest

from experiments import readme_table, results_page
from experiments.page_tables import tables_of_page


@pytest.mark.parametrize("page", results_page.PARTS)
def test_pages_have_what_benchmarks_print_of_stored_figures(page: str) -> None:
    made = results_page.blocks(page)
    shown = tables_of_page((results_page.DOCS / page).read_text(encoding="utf-8"))
    assert {name: shown[name] for name in made} == made
    assert all("| " in text for text in made.values())


def test_the_readme_has_the_stored_figures() -> None:
    text = readme_table.README.read_text(encoding="utf-8")
    assert tables_of_page(text) == readme_table.blocks()
    assert len(text.splitlines()) <= 100
