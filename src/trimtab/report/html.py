"""The page: one HTML file with everything in it, for a browser without a network."""

from __future__ import annotations

import os
import re
from html import escape
from importlib.resources import files

from trimtab.files import write_whole
from trimtab.report.content import Report
from trimtab.report.embed import embedded
from trimtab.report.sections import sections

SCRIPTS = ("common.js", "bars.js", "heatmap.js", "timeline.js", "page.js")


def write_html(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page, whole or not at all."""
    write_whole(path, page_of(report))


def page_of(report: Report) -> str:
    """The page as text. It needs nothing from anywhere else."""
    data, blobs = embedded(report)
    parts = sections(report)
    values = {
        "title": escape(report.title),
        "answer": escape(report.answer),
        "nav": "".join(f'<a href="#{part.name}">{part.word}</a>' for part in parts),
        "sections": "\n".join(part.html for part in parts),
        "data": data,
        "blobs": blobs,
        "css": _asset("page.css"),
        "js": "\n".join(_asset(name) for name in SCRIPTS),
    }
    # In one pass, so that what a name in a report looks like does not matter.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (files("trimtab.report") / "page" / name).read_text(encoding="utf-8")
