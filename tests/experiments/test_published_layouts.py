"""Published recipes: the page has the stored figures, and layouts are those that can exist."""

from __future__ import annotations

import json
from typing import Any

import pytest

from experiments import published_layouts
from experiments.page_tables import read_page, tables_of_page
from experiments.published_layouts import PAGE, PUBLISHED, SEQUENCE_TOKENS, blocks
from trimtab.cluster import Layout, load_model


def test_the_page_has_the_stored_figures() -> None:
    stored = json.loads((PAGE.parent / "benchmarks" / "published-layouts.json").read_text())
    shown = tables_of_page(read_page(PAGE))
    assert {name: text.strip() for name, text in blocks(stored).items()}.items() <= shown.items()
    for recipe, each in zip(PUBLISHED, stored["recipes"], strict=True):
        assert recipe.items() <= each.items()
        assert each["ratio"] == pytest.approx(each["simulated_tokens_per_s"] / recipe["tokens_per_s"])


@pytest.mark.parametrize("recipe", PUBLISHED, ids=lambda recipe: recipe["model"])
def test_recipes_divide_their_gpus(recipe: dict[str, Any]) -> None:
    model = load_model(recipe["model"])
    groups, rest = divmod(recipe["gpus"], recipe["ep"] * recipe["pp"])
    assert rest == 0
    Layout(recipe["tp"], recipe["pp"]).check(model, recipe["ep"], groups)
    assert recipe["sequences"] * recipe["tp"] * recipe["pp"] % recipe["gpus"] == 0
    assert SEQUENCE_TOKENS % recipe["tp"] == 0


def test_long_steps_follow_from_two_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 s for the first and last micro-batches, 2 s for each other one."""
    monkeypatch.setattr(published_layouts, "_step", lambda recipe, ranks, size: (3.0 + 2.0 * size, 7))
    found = published_layouts.compare(PUBLISHED[0])
    micro_batches = 1024 // 8
    expected = 1024 * 4096 / (3 + 2 * micro_batches) / 16
    assert found["simulated_tokens_per_s"] == pytest.approx(expected)
    assert found["peak_bytes"] == 7
