"""Tables of stored figures, for the terminal and for `experiments/papers/README.md`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.page_tables import markdown_table
from trimtab.errors import InputError

SCHEMA = "trimtab-bench-papers-1"
SET_UPS = "set-ups"


def read_figures(path: Path) -> dict[str, Any]:
    """Read figures that `experiments.papers --json` wrote. Raises InputError if the file is missing or has others."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected figures of python -m experiments.papers (.json)")
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        figures = None
    if not isinstance(figures, dict) or figures.get("schema") != SCHEMA:
        raise InputError(f"{path}: not figures of python -m experiments.papers, which begin with the schema {SCHEMA}")
    return figures


def blocks(figures: dict[str, Any]) -> dict[str, str]:
    """Tables in Markdown, by row, and one of all set-ups."""
    rows = figures["rows"]
    tables = {name: markdown_table(*_figures(row)) for name, row in rows.items()}
    return {SET_UPS: markdown_table(*_set_ups(rows))} | tables


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """Print one table per row."""
    if "yardstick" in figures:
        console.print(f"presets, other balancers and planning times of yardstick {figures['yardstick']}")
    for row in figures["rows"].values():
        header, body = _figures(row)
        table = Table(title=f"{row['paper']} ({row['seconds']:.0f} s)", title_justify="left", title_style="bold")
        for column in header:
            table.add_column(column)
        for cells in body:
            table.add_row(*cells)
        console.print(table)


def _figures(row: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of a row: for each figure the published value, then ours by set-up."""
    by_figure = zip(*(set_up["figures"] for set_up in row["set_ups"]), strict=True)
    body = [[each[0]["title"], each[0]["published"], *map(_range, each)] for each in by_figure]
    return ["", "published", *(set_up["title"] for set_up in row["set_ups"])], body


def _range(figure: dict[str, Any]) -> str:
    """Smallest and largest value over presets and seeds, and the median."""
    values = [value for by_seed in figure["values"].values() for value in by_seed]
    low, high, middle = (
        _formatted(value, figure["style"]) for value in (min(values), max(values), statistics.median(values))
    )
    unit = figure["style"]
    return f"{middle}{unit}" if low == high else f"{low} to {high}{unit} ({middle})"


def _formatted(value: float, style: str) -> str:
    return f"{100 * value:.1f}" if style == "%" else f"{value:.2f}"


def _set_ups(rows: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table of set-ups. Name and time of a row are in its first line."""
    columns = {
        "row": "{name}",
        "model, ranks": "{title}",
        "nodes of": "{ranks_per_node}",
        "cluster": "`{cluster}`",
        "micro-steps x tokens a rank": "{micro_steps} x {tokens:,}",
        "sequences (mean, longest)": "{sequences:,} ({mean_length:,}, {longest:,})",
        "layers": "{layers}",
        "slots": "{slots}",
        "row takes": "{takes}",
    }
    body = []
    for name, row in rows.items():
        first = {"name": f"`{name}`", "takes": f"{row['seconds']:.0f} s"}
        for set_up in row["set_ups"]:
            body.append([text.format_map(set_up | first) for text in columns.values()])
            first = {"name": "", "takes": ""}
    return list(columns), body
