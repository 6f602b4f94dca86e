"""The page as text: one self-contained file in which all texts of users are escaped."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.reports import EVIL, edge_reports, some_report, some_timeline
from trimtab.report.html import page_of, write_html
from trimtab.report.model import LoadMap
from trimtab.report.number_text import bytes_text, seconds
from trimtab.report.payload import busiest_ranks
from trimtab.report.table_data import Row, TableData

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


def data_of(page: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    match = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    assert match
    blobs = re.findall(r'<script type="text/plain" id="(blob-\d+)">([^<]*)</script>', page)
    return json.loads(match[1]), {name: base64.b64decode(text) for name, text in blobs}


def test_tags_match_ids_are_unique_and_nothing_is_fetched() -> None:
    page = page_of(some_report())
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
    cases = TableData(
        "Seconds of a step in every case", ("ranks", "static"), (Row("8", ("6.93",)), Row("16", ("3.41",)))
    )
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


def test_texts_of_a_report_are_escaped() -> None:
    report = some_report(title=EVIL)
    policy = replace(report.policies[0], name=EVIL, about=EVIL, memory_bytes={EVIL: 1e9})
    report = replace(
        report,
        answer=EVIL,
        facts=((EVIL, EVIL),),
        policies=(policy, *report.policies[1:]),
        layer_names=(EVIL,) * len(report.layer_names),
        before=replace(report.before, title=EVIL),
        timelines=tuple(replace(t, title=EVIL, names=(EVIL, *t.names[1:])) for t in report.timelines),
        notes=(EVIL,),
    )
    page = page_of(report)
    parsed = Parsed(page)
    assert parsed.open == []
    assert not [tag for tag, _ in parsed.elements if tag == "img"]
    assert not [name for _, attributes in parsed.elements for name in attributes if name.startswith("on")]
    assert "".join(parsed.texts["h1"]) == EVIL
    values, _ = data_of(page)
    assert values["layers"] == [EVIL] * len(report.layer_names)
    assert values["timelines"][0]["names"][0] == EVIL


def test_loads_survive_encoding() -> None:
    for largest, size in ((255, 1), (256, 2), (65535, 2), (65536, 4), (2**32 - 1, 4), (2**32, 8)):
        report = some_report()
        loads = report.before.loads_MLR.copy()
        loads[:] = loads % 200
        loads[1, 2, 3] = largest
        values, blobs = data_of(page_of(replace(report, before=LoadMap("static", loads))))
        part = values["maps"][0]
        raw = blobs[part["blob"]["id"]]
        assert len(raw) == loads.size * size
        found = np.frombuffer(raw, "<" + part["blob"]["type"]).reshape(part["M"], part["L"], part["R"])
        assert np.array_equal(found, loads)


def test_timelines_survive_encoding() -> None:
    report = some_report()
    timeline = report.timelines[1]
    values, blobs = data_of(page_of(report))
    part = values["timelines"][1]
    column = {name: np.frombuffer(blobs[b["id"]], "<" + b["type"]) for name, b in part["blobs"].items()}
    found = set()
    for rank, lane, first, count in part["rows"]:
        for n in range(first, first + count):
            layer = -1 if column["layer"][n] == part["no_layer"] else int(column["layer"][n])
            times = (int(column[name][n]) for name in ("start", "end"))
            found.add((rank, lane, int(column["kind"][n]), layer, *times))
    columns = (timeline.rank_N, timeline.lane_N, timeline.kind_N, timeline.layer_N)
    assert part["tick"] == 1e-9
    nanoseconds = [np.rint(t / 1e-9).astype(int) for t in (timeline.start_N, timeline.end_N)]
    assert found == set(zip(*(c.tolist() for c in (*columns, *nanoseconds)), strict=True))
    long = replace(timeline, start_N=timeline.start_N * 1e4, end_N=timeline.end_N * 1e4)
    values, blobs = data_of(page_of(replace(report, timelines=(long,))))
    part = values["timelines"][0]
    ends = np.frombuffer(blobs[part["blobs"]["end"]["id"]], "<u4")
    assert ends.max() * part["tick"] == pytest.approx(long.end_N.max(), rel=1e-8)


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


def test_a_policy_without_parts_is_shown_as_not_broken_down() -> None:
    report = some_report()
    policies = (report.policies[0], replace(report.policies[6], parts_s={}, fraction_of_balanced=None))
    page = page_of(replace(report, policies=policies))
    assert "trimtab: 4.08 s. all parts 4.08 s, not broken down" in page
    assert "<td>–</td>" in page


@pytest.mark.parametrize("name", edge_reports())
def test_pages_of_small_and_unusual_reports_are_complete(name: str) -> None:
    page = page_of(edge_reports()[name])
    assert Parsed(page).open == []
    data_of(page)


def test_the_page_of_a_large_step_is_below_8_mb(tmp_path: Path) -> None:
    report = some_report(ranks=64, layers=72, micro_steps=32)
    assert min(len(t.kind_N) for t in report.timelines) > 55_000
    write_html(report, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 8e6


def test_a_failed_write_keeps_the_old_page(tmp_path: Path) -> None:
    write_html(some_report(), tmp_path / "deep" / "report.html")
    broken = replace(some_report(), layer_names=())
    with pytest.raises(IndexError):
        write_html(broken, tmp_path / "deep" / "report.html")
    assert (tmp_path / "deep" / "report.html").read_text() == page_of(some_report())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["report.html"]


def test_numbers_have_about_three_digits_and_a_unit() -> None:
    assert [seconds(s) for s in (0, 4.0781, 12.34, 0.4567, 0.0000021)] == [
        "0.00 s",
        "4.08 s",
        "12.3 s",
        "457 ms",
        "2.10 µs",
    ]
    assert seconds(0.05, 3.0) == "0.05 s"
    assert [bytes_text(b) for b in (12, 1.5e3, 108e6, 11.2e9)] == ["12 B", "1.50 kB", "108 MB", "11.2 GB"]
