"""`experiments.papers`: measures of hand-made loads, a tiny run, and the page compared with the stored figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.harness import run_command
from experiments.page_tables import replace_tables, tables_of_page
from experiments.papers.measures import Case, buffer, lost_in_layers, of_balanced, rows, speedup, straggler_cut
from experiments.papers.page import blocks, read_figures
from experiments.papers.published import ROWS, VARIANTS, Figure, Row, SetUp
from experiments.papers.reproduce import run_papers
from trimtab.errors import InputError
from trimtab.policies import POLICIES
from trimtab.simulator.yardstick import yardstick

ROOT = Path(__file__).parents[2]
TINY = SetUp("gpt-oss-20b", 4, layers=2, micro_steps=2, tokens=256, mean_length=64, longest=128)


def _outcome(step_s: float, planning_s: float, loads: list[int]) -> Any:
    loads_MLR = np.array(loads)[None, None]
    work = SimpleNamespace(
        loads_MLR=loads_MLR, experts_MLR=loads_MLR * 1.0, moved_MLR=np.zeros(loads_MLR.shape),
        near_MLR=np.full(loads_MLR.shape, 0.25), far_MLR=np.full(loads_MLR.shape, 0.5),
    )  # fmt: skip
    parts_s = {"planning": planning_s, "migration": 0.0}
    memory = {"replica pool": 3, "expert parameters": 8, "dense parameters": 4}
    simulated = SimpleNamespace(step_time_s=step_s, parts_s=parts_s, work=work)
    return SimpleNamespace(simulated=simulated, balance=SimpleNamespace(mean=1.0), memory=memory)


def _hand_made() -> Case:
    outcomes = {
        "static": _outcome(12.0, 0.0, [9, 1, 2, 0]),
        "trimtab": _outcome(8.0, 2.0, [4, 3, 3, 2]),
        "balanced": _outcome(6.0, 0.0, [3, 3, 3, 3]),
    }
    return Case(SimpleNamespace(cluster=SimpleNamespace(dispatch_s=1.0)), outcomes)  # type: ignore[arg-type]


def test_measures_of_hand_made_steps() -> None:
    case = _hand_made()
    assert speedup("trimtab", "static")(case) == 1.5
    assert speedup("trimtab", "static", planning=False)(case) == 2.0
    assert of_balanced("trimtab")(case) == 0.75
    assert of_balanced("trimtab", planning=False)(case) == 1.0
    assert buffer("trimtab")(case) == 0.25
    # The busiest rank has 6 rows more than the mean, then 1.
    assert straggler_cut("trimtab", rows)(case) == pytest.approx(5 / 6)
    # The mean rank waits 6 of 9 seconds, and two exchanges take 1.5 seconds each.
    assert lost_in_layers("static")(case) == pytest.approx(6 / 12)


def test_a_tiny_run_gives_the_same_figures_twice() -> None:
    row = next(row for row in ROWS if row.name == "relibra")
    tiny = replace(row, set_ups=(TINY, replace(TINY, equal_terms=True)))
    figures = run_papers([tiny], ["qwen3-30b-math"], [0, 1])
    again = run_papers([replace(row, set_ups=(TINY,))], ["qwen3-30b-math"], [0, 1])
    assert figures["rows"]["relibra"]["set_ups"][:1] == again["rows"]["relibra"]["set_ups"]
    assert figures["yardstick"] == yardstick()
    own, equal = figures["rows"]["relibra"]["set_ups"]
    values = {figure["title"]: figure["values"]["qwen3-30b-math"] for figure in own["figures"]}
    assert all(len(by_seed) == 2 for by_seed in values.values())
    assert all(0.5 < value <= 1.01 for value in values["relibra of balanced"])
    assert all(1.0 <= value < 4.0 for value in values["max/mean, static"])
    # On equal terms homes are given: reordering alone is static expert parallelism with some planning time.
    (alone,) = (f["values"] for f in equal["figures"] if f["title"] == "reordering alone over static")
    assert all(0.9 < value <= 1.0 for value in alone["qwen3-30b-math"])


def test_packing_does_not_make_routepack_slower_than_placement_alone() -> None:
    figures = (Figure("of placement", speedup("routepack", "routepack, placement")),)
    names = ("routepack, placement", "routepack")
    tiny = run_papers([Row("routepack", "", names, figures, (TINY,))], ["qwen3-30b-math"], [0])
    ((figure,),) = (set_up["figures"] for set_up in tiny["rows"]["routepack"]["set_ups"])
    assert figure["values"]["qwen3-30b-math"][0] > 0.99


def test_every_row_can_be_computed() -> None:
    """Every figure uses only balancers of its row, and each balancer exists."""
    for row in ROWS:
        assert set(row.policies) <= POLICIES.keys() | VARIANTS.keys()
        outcomes = {name: _outcome(1.0, 0.0, [2, 1, 1, 0]) for name in row.policies}
        case = Case(_hand_made().case, outcomes)
        for figure in row.figures:
            assert np.isfinite(figure.measure(case)), figure.title
        for set_up in row.set_ups:
            assert set_up.sequences * set_up.mean_length == set_up.ranks * set_up.micro_steps * set_up.tokens


def test_the_page_shows_the_stored_figures_of_the_present_set_ups() -> None:
    figures = read_figures(ROOT / "docs" / "benchmarks" / "papers.json")
    stored = figures["rows"]
    assert list(stored) == [row.name for row in ROWS]
    page = (ROOT / "experiments" / "papers" / "README.md").read_text(encoding="utf-8")
    assert tables_of_page(page) == blocks(figures)
    for row in ROWS:
        assert f"python -m experiments.papers --rows {row.name}\n" in page
        assert [each["title"] for each in stored[row.name]["set_ups"]] == [each.title for each in row.set_ups]
        for set_up in stored[row.name]["set_ups"]:
            written = [(each["title"], each["published"]) for each in set_up["figures"]]
            assert written == [(each.title, each.published) for each in row.figures]


def _figures(value: float) -> dict[str, Any]:
    figure = {"title": "a over b", "published": "1.5x", "style": "x", "values": {"qwen3-30b-math": [value, 2.0]}}
    set_up = {
        "title": "m, EP 4", "ranks_per_node": 4, "cluster": "h100x8", "micro_steps": 2, "tokens": 4096, "sequences": 8,
        "mean_length": 64, "longest": 128, "layers": 2, "slots": 2, "figures": [figure],
    }  # fmt: skip
    return {"schema": "trimtab-bench-papers-1", "rows": {"some": {"paper": "P", "seconds": 1.0, "set_ups": [set_up]}}}


def test_tables_replace_those_of_the_page(tmp_path: Path) -> None:
    page, json_file = tmp_path / "page.md", tmp_path / "figures.json"
    place = "<!-- figures: {} -->\nold\n<!-- end -->\n"
    page.write_text(f"before\n{place.format('set-ups')}between\n{place.format('some')}{place.format('other')}after\n")
    json_file.write_text(json.dumps(_figures(1.25)))
    assert run_command("experiments.papers.__main__", ["--read", str(json_file), "--page", str(page)]) == 0
    text = page.read_text()
    assert "| a over b | 1.5x | 1.25 to 2.00x (1.62) |" in text
    assert text.count("old") == 1
    assert text.startswith("before\n")
    assert text.endswith("after\n")


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    with pytest.raises(InputError, match="no such file"):
        replace_tables(blocks(_figures(1.0)), page)
    page.write_text("nothing here")
    with pytest.raises(InputError, match="'<!-- figures: set-ups -->'"):
        replace_tables(blocks(_figures(1.0)), page)
    assert page.read_text() == "nothing here"
    for content in ("{}", "[", "[]"):
        page.write_text(content)
        with pytest.raises(InputError, match=r"not figures of python -m experiments\.papers"):
            read_figures(page)
