"""The stories of docs/advise.md are those of the stored figures, and their commands those of the settings."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.advice_stories import PAGE, STORIES, TRACE, blocks
from experiments.page_tables import read_page, tables_of_page


def test_the_page_has_the_stored_figures() -> None:
    stored = json.loads((Path(PAGE).parent / "benchmarks" / "advice-stories.json").read_text())
    assert stored["trace"] == TRACE
    tables = tables_of_page(read_page(PAGE))
    assert {name: tables[name] for name in STORIES} == {name: text.strip() for name, text in blocks(stored).items()}


def test_the_commands_are_those_of_the_settings() -> None:
    page = read_page(PAGE)
    for preset, of_model, setting in STORIES.values():
        assert f"trimtab trace synth {preset} " in page
        options = {"num_experts": "--experts", "top_k": "--top-k"}
        assert all(f"{options[name]} {value}" in page for name, value in of_model.items())
        words = [f" --{name} {setting[name]}" for name in ("ranks", "groups", "tp", "pp") if name in setting]
        tokens = f"{setting['step_tokens'] // 10**6}M"
        command = f"--model {setting['model']}{''.join(words)} --step-tokens {tokens} --recompute-granularity full"
        assert f"{command} --gpu-hour {setting['gpu_hour']}" in page
