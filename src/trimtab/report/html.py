"""The page: one self-contained HTML file that opens offline."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from trimtab.files import json_text, write_atomically
from trimtab.report.advice import Advice, advice_sections
from trimtab.report.analysis_sections import analysis_sections
from trimtab.report.comparison_report import ComparisonReport, comparison_sections
from trimtab.report.model import AnalysisReport, Report
from trimtab.report.page_data import PageArrays, analysis_data, in_script, load_scale, page_data, simulation_data
from trimtab.report.sections import sections
from trimtab.report.widgets import summary

SCRIPTS = ("common.js", "bars.js", "heatmap.js", "grid.js", "timeline.js", "downloads.js", "page.js")
# Control characters, which a browser drops; bidirectional ones, which reorder the text after a name; bytes of a file's
# name that are not UTF-8, which can't be written.
NOT_SHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


Page = Report | AnalysisReport | ComparisonReport | Advice


def write_html(report: Page, path: str | os.PathLike[str], figures: Mapping[str, Any] | None = None) -> None:
    """Write the page, atomically; see `page_of`."""
    write_atomically(path, page_of(report, figures))


def page_of(report: Page, figures: Mapping[str, Any] | None = None) -> str:
    """The page as text, without external resources. Characters of names that can't be shown are U+FFFD.

    Args:
        figures: the result's JSON, which a button of the page saves; None: no button.
    """
    arrays = PageArrays()
    if isinstance(report, AnalysisReport):
        data, parts = analysis_data(report.analysis, arrays), analysis_sections(report)
    elif isinstance(report, Advice | ComparisonReport):
        data = page_data((), (), load_scale(()), start_layer=-1)
        parts = advice_sections(report) if isinstance(report, Advice) else comparison_sections(report)
    else:
        data, parts = simulation_data(report, arrays), sections(report)
    headline, _, rest = report.answer.partition(". ")
    script = _script()
    values = {
        "title": escape(report.title),
        "headline": escape(f"{headline}." if rest else headline),
        "answer": summary(report.assumed) + summary(rest),
        "nav": "".join(f'<a href="#{part.name}">{part.word}</a>' for part in parts),
        "sections": "\n".join(part.html for part in parts),
        "data": in_script(json.dumps(data, allow_nan=False)),
        "figures": _figures_element(figures) if figures else "",
        "arrays": "\n".join(arrays.elements),
        "css": _asset("page.css"),
        "script": script,
        # The browser runs no other script, whatever a name contains.
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    # In one pass, so names in a report may contain placeholders.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _asset("page.html"))
    return NOT_SHOWN.sub("\ufffd", page)


def _figures_element(figures: Mapping[str, Any]) -> str:
    return f'<script type="application/json" id="result">{in_script(json_text(figures))}</script>'


def _script() -> str:
    text = "\n".join(_asset(name) for name in SCRIPTS)
    return f'\n(async function () {{\n"use strict";\n{text}\n}})();\n'


def _asset(name: str) -> str:
    return (files("trimtab.report") / "page" / name).read_text(encoding="utf-8")
