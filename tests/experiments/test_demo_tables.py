"""The demo's tables are those of the stored run, and say what its interval shows."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from experiments.demo_tables import FIGURES, RESULTS, blocks
from experiments.page_tables import tables_of_page

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_stored_run() -> None:
    made = blocks(json.loads((ROOT / FIGURES).read_text()))
    assert tables_of_page((ROOT / RESULTS).read_text())["demo-costs"] == made["demo-costs"]


def test_a_gain_is_claimed_only_above_the_interval() -> None:
    figures = json.loads((ROOT / FIGURES).read_text())
    texts = set()
    for interval in ([1.01, 1.2], [0.9, 1.1], [0.8, 0.95]):
        changed = copy.deepcopy(figures)
        changed["comparison"]["speedup_interval"] = interval
        texts.add(blocks(changed)["demo-costs"].rpartition("CPU machine.")[2])
    above, around, below = "is above 1", "no sure gain", "is slower"
    assert [sum(part in text for text in texts) for part in (above, around, below)] == [1, 1, 1]
