"""docs/rollout.md has the stored figures."""

from __future__ import annotations

import json

from experiments.page_tables import read_page, tables_of_page
from experiments.rollout_figures import PAGE, RANKS, SETTINGS, TRACE, blocks


def test_the_page_has_the_stored_figures() -> None:
    stored = json.loads((PAGE.parent / "benchmarks" / "rollout.json").read_text())
    assert (stored["trace"], stored["ranks"], [*stored["sizings"]]) == (TRACE, RANKS, [*SETTINGS])
    for name, (_, setting) in SETTINGS.items():
        stored_settings = stored["sizings"][name]["settings"]
        assert [stored_settings[key] for key in ("model", "most_gpus")] == [setting["model"], setting["gpus"]]
    made = blocks(stored)
    tables = tables_of_page(read_page(PAGE))
    assert {name: tables[name] for name in made} == {name: text.strip() for name, text in made.items()}
