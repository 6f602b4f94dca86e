"""The page: one self-contained HTML file that opens offline."""

from __future__ import annotations

import json
import os
import re
from html import escape
from importlib.resources import files

from trimtab.files import write_atomically
from trimtab.report.analysis_data import analysis_data
from trimtab.report.analysis_sections import analysis_sections
from trimtab.report.model import AnalysisReport, Report
from trimtab.report.page_arrays import PageArrays
from trimtab.report.payload import in_script, simulation_data
from trimtab.report.sections import sections
from trimtab.report.widgets import summary

SCRIPTS = ("common.js", "bars.js", "heatmap.js", "grid.js", "timeline.js", "page.js")


def write_html(report: Report | AnalysisReport, path: str | os.PathLike[str]) -> None:
    """Write the page, atomically."""
    write_atomically(path, page_of(report))


def page_of(report: Report | AnalysisReport) -> str:
    """The page as text, without external resources."""
    arrays = PageArrays()
    if isinstance(report, AnalysisReport):
        data, parts = analysis_data(report.analysis, arrays), analysis_sections(report)
    else:
        data, parts = simulation_data(report, arrays), sections(report)
    headline, _, rest = report.answer.partition(". ")
    values = {
        "title": escape(report.title),
        "headline": escape(f"{headline}." if rest else headline),
        "answer": summary(rest),
        "nav": "".join(f'<a href="#{part.name}">{part.word}</a>' for part in parts),
        "sections": "\n".join(part.html for part in parts),
        "data": in_script(json.dumps(data, allow_nan=False)),
        "arrays": "\n".join(arrays.elements),
        "css": _asset("page.css"),
        "js": "\n".join(_asset(name) for name in SCRIPTS),
    }
    # In one pass, so names in a report may contain placeholders.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (files("trimtab.report") / "page" / name).read_text(encoding="utf-8")
