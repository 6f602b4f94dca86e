"""The page as text: one self-contained file in which all texts of users are escaped."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from helpers.pages import array_of, values_of
from helpers.reports import EVIL, crowded_report, edge_reports, some_report, some_timeline
from trimtab.array_type import Array
from trimtab.report.html import page_of, write_html
from trimtab.report.model import LoadMap, Report, Timeline
from trimtab.report.page_data import PageArrays, busiest_ranks
from trimtab.report.tables import Row, TableData
from trimtab.timeline.recorded_operations import LANES

VOID = {"meta", "link", "input", "br", "img"}


class Parsed(HTMLParser):
    """A parsed page: elements with attributes, and text by element. Checks that tags match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


@pytest.mark.parametrize("report", [some_report(), *edge_reports().values()])
def test_tags_match_ids_are_unique_and_nothing_is_fetched(report: Report) -> None:
    page = page_of(report)
    parsed = Parsed(page)
    assert parsed.open == []
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in parsed.elements:
        assert tag not in {"img", "iframe", "object", "base"}
        for name in ("src", "href", "action", "data"):
            assert str(attributes.get(name, "#")).startswith(("#", "data:,"))
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest", page)
    for referred in re.findall(r'(?:for|aria-describedby|aria-labelledby)="([^"]+)"', page):
        assert set(referred.split()) <= set(ids)
    assert "default-src 'none'" in page
    values_of(page)


def test_answer_and_figures_are_in_the_html_without_scripts() -> None:
    report = some_report()
    page = page_of(report)
    assert report.answer in Parsed(page).texts["h1"]
    for text in ("6.93 s", "1.70x", "97.3%", "1.006", "40.7", "23.1%", "h100x8, 8 ranks", "The trace is synthetic."):
        assert text in page
    order = [page.index(f'<section id="{name}"') for name in
             ("policies", "time", "load", "step-timeline", "layers", "memory", "setting", "notes")]  # fmt: skip
    assert order == sorted(order)


def test_the_table_of_a_sweep_comes_first_and_memory_is_compared_with_the_device() -> None:
    report = some_report()
    cases = TableData("Seconds of a step", ("ranks", "static"), (Row("8", ("6.93",)), Row("16", ("3.41",))))
    policies = tuple(replace(policy, fits=policy.name != "llep") for policy in report.policies)
    page = page_of(replace(report, cases=cases, policies=policies, device_bytes=4e10))
    sections = re.findall(r'<section id="([\w-]+)"', page)
    assert sections[:2] == ["cases", "policies"]
    assert "6.93" in page[page.index('id="cases"') : page.index('id="policies"')]
    assert "A rank has 40.0 GB; does not fit: llep." in page
    assert "a rank has 40.0 GB" in page[page.index('id="policies"') : page.index('id="time"')]
    every = tuple(replace(policy, fits=True) for policy in policies)
    assert "A rank has 40.0 GB; all policies fit." in page_of(replace(report, policies=every, device_bytes=4e10))
    assert "cases" not in re.findall(r'<section id="([\w-]+)"', page_of(report))


def test_a_figure_above_the_ideal_has_its_reason() -> None:
    report = some_report()
    reason = "above 100% where a plan also balances sequences, or sends fewer rows to other ranks"
    shown = Parsed(page_of(report)).texts
    assert "97.3%" in str(shown)
    assert reason not in page_of(report)
    better = replace(report.policies[6], fraction_of_balanced=1.06)
    page = page_of(replace(report, policies=(*report.policies[:6], better, report.policies[7])))
    assert "106.0%" in page
    assert reason in page[page.index('id="policies"') : page.index('id="time"')]


def test_texts_of_a_report_are_escaped() -> None:
    report = replace(some_report(), title=EVIL)
    policy = replace(report.policies[0], name=EVIL, about=EVIL, memory_bytes={EVIL: 1e9})
    report = replace(
        report, answer=EVIL, facts=((EVIL, EVIL),), policies=(policy, *report.policies[1:]),
        layer_names=(EVIL,) * len(report.layer_names), before=replace(report.before, title=EVIL),
        timelines=tuple(replace(t, title=EVIL, names=(EVIL, *t.names[1:])) for t in report.timelines), notes=(EVIL,),
    )  # fmt: skip
    page = page_of(report)
    parsed = Parsed(page)
    assert parsed.open == []
    assert not [tag for tag, _ in parsed.elements if tag == "img"]
    assert not [name for _, attributes in parsed.elements for name in attributes if name.startswith("on")]
    assert "".join(parsed.texts["h1"]) == EVIL
    values = values_of(page)
    assert values["layers"] == [EVIL] * len(report.layer_names)
    assert values["timelines"][0]["names"][0] == EVIL


def loads_on_page(report: Report, loads_MLR: Array) -> tuple[int, Array]:
    """Unit and loads of the first map on the page of a report with these loads."""
    page = page_of(replace(report, before=LoadMap("static", loads_MLR)))
    part = values_of(page)["maps"][0]
    found = array_of(page, part["array"]).reshape(part["L"], part["R"], part["M"]).transpose(2, 0, 1)
    return part["unit"], part["unit"] * found


@pytest.mark.parametrize("largest", [255, 256, 65536, 2**32])
def test_loads_of_a_small_page_are_exact(largest: int) -> None:
    report = some_report()
    loads = report.before.loads_MLR.copy()
    loads[1, 2, 3] = largest
    unit, found = loads_on_page(report, loads)
    assert unit == 1
    assert np.array_equal(found, loads)


def test_loads_of_a_large_page_are_exact_to_a_thousandth_of_the_mean() -> None:
    report = some_report(ranks=64, layers=64, micro_steps=32)
    loads = report.before.loads_MLR * 7
    unit, found = loads_on_page(report, loads)
    assert unit > 1
    assert np.abs(found - loads).max() <= loads.mean() / 1000


def test_timelines_survive_encoding() -> None:
    report = some_report()
    timeline = report.timelines[1]

    def operations(page: str, index: int) -> tuple[float, set[tuple[int | str, ...]]]:
        part = values_of(page)["timelines"][index]
        column = {name: array_of(page, each).tolist() for name, each in part["arrays"].items()}
        ends = [start + length for start, length in zip(column["start"], column["length"], strict=True)]
        lanes = [part["lanes"][lane] for lane in column["lane"]]
        return part["tick"], set(
            zip(column["rank"], lanes, column["kind"], column["layer"], column["start"], ends, strict=True)
        )

    def expected(timeline: Timeline, tick: float) -> set[tuple[int | str, ...]]:
        lanes = [LANES[lane] for lane in timeline.lane_N.tolist()]
        times = [np.rint(t / tick).astype(int).tolist() for t in (timeline.start_N, timeline.end_N)]
        columns = (timeline.kind_N.tolist(), timeline.layer_N.tolist(), *times)
        return set(zip(timeline.rank_N.tolist(), lanes, *columns, strict=True))

    tick, found = operations(page_of(report), 1)
    assert tick <= timeline.end_N.max() / 1e6
    assert found == expected(timeline, tick)
    short = replace(timeline, start_N=timeline.start_N / 1e5, end_N=timeline.end_N / 1e5)
    tick, found = operations(page_of(replace(report, timelines=(short,))), 0)
    assert tick == 1e-9
    assert found == expected(short, tick)


def test_lanes_with_concurrent_operations_have_distinct_names() -> None:
    lanes = values_of(page_of(crowded_report()))["timelines"][0]["lanes"]
    assert lanes == ["compute", "compute (2)", "node link", "node link (2)"]


@pytest.mark.parametrize("values", [[], [0], [7, 7, 7], [0, 2**40, -5, 3], [-1, 255, -256, 65535]])
def test_arrays_survive_packing(values: list[int]) -> None:
    arrays = PageArrays()
    part = arrays(np.array(values, np.int64))
    assert array_of(arrays.elements[0], part).tolist() == values


def test_busiest_ranks_have_most_compute_time() -> None:
    loads_LR = np.full((3, 20), 1000)
    loads_LR[:, [4, 9, 17]] = 9000
    loads_LR[:, 11] = 10
    timeline = some_timeline("t", loads_LR)
    busiest = busiest_ranks(timeline)
    assert len(busiest) == 8
    assert {4, 9, 17} <= set(busiest)
    assert 11 not in busiest
    assert busiest == sorted(busiest)


def test_worst_layers_have_their_max_over_mean_before_and_after() -> None:
    """Layer 0 is even in sum over micro-steps, but in none of them."""
    before = np.array([[[30, 10], [24, 16]], [[10, 30], [24, 16]]])
    after = np.array([[[22, 18], [20, 20]], [[18, 22], [20, 20]]])
    report = replace(
        some_report(layers=2), layer_names=("3", "7"), before=LoadMap("static", before), after=LoadMap("plan", after)
    )
    page = page_of(report)
    text = page[page.index('<section id="layers"') : page.index('<section id="memory"')]
    assert '<th scope="col">static, max/mean</th><th scope="col">plan, max/mean</th>' in text
    cells = r"<td>([\d.]+)</td><td>([\d.]+)</td><td>(.*?)</td>"
    rows = re.findall(rf'data-layer="(\d)">layer (\d)</button></th>{cells}', text)
    assert rows == [("0", "3", "1.500", "1.100", "1.36×"), ("1", "7", "1.200", "1.000", "1.20×")]
    assert values_of(page)["start_layer"] == 0


def test_a_policy_without_parts_is_shown_as_not_broken_down() -> None:
    report = some_report()
    policies = (report.policies[0], replace(report.policies[6], parts_s={}, fraction_of_balanced=None))
    page = page_of(replace(report, policies=policies))
    assert "trimtab: 4.08 s. all parts 4.08 s, not broken down" in page
    assert "<td>–</td>" in page


def test_a_page_of_94_layers_and_128_ranks_is_below_2_mb(tmp_path: Path) -> None:
    report = some_report(ranks=128, layers=94, micro_steps=32)
    rng = np.random.default_rng(0)

    def finer(part: LoadMap) -> LoadMap:
        return replace(part, loads_MLR=part.loads_MLR * 8 + rng.integers(0, 8, part.loads_MLR.shape))

    def unlike(timeline: Timeline) -> Timeline:
        """Without the equal lengths and the gapless sequences of a made-up timeline, which compress well."""
        lengths = (timeline.end_N - timeline.start_N) * rng.uniform(0.9, 1, len(timeline.end_N))
        return replace(timeline, end_N=timeline.start_N + lengths)

    timelines = tuple(map(unlike, report.timelines))
    report = replace(report, before=finer(report.before), after=finer(report.after), timelines=timelines)
    write_html(report, tmp_path / "report.html")
    assert min(len(timeline.kind_N) for timeline in report.timelines) > 140_000
    assert (tmp_path / "report.html").stat().st_size < 2e6


def test_a_failed_write_keeps_the_old_page(tmp_path: Path) -> None:
    write_html(some_report(), tmp_path / "deep" / "report.html")
    broken = replace(some_report(), layer_names=())
    with pytest.raises(IndexError):
        write_html(broken, tmp_path / "deep" / "report.html")
    assert (tmp_path / "deep" / "report.html").read_text() == page_of(some_report())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["report.html"]
