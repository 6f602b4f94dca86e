"""`python -m experiments.results_page`: write what benchmarks print of their stored figures into the pages of docs/."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from experiments.page_tables import markdown_table, replace_tables

DOCS = Path(__file__).parents[1] / "docs"
Figures = dict[str, Any]


def _one_case(figures: Figures) -> Figures:
    """The largest case of skewed routing with two slots, each balancer on its own recipe."""
    case = {"ranks": 64, "experts": 256, "trace": "qwen3-30b-math", "slots": 2, "terms": "own"}
    cases = [each for each in figures["cases"] if case.items() <= each.items()]
    return figures | {"cases": cases, "schedule": [], "milp": []}


def _largest(figures: Figures) -> Figures:
    """The cases of the most ranks."""
    most = max(figures["settings"]["ranks"])
    parts = {name: [row for row in figures[name] if row["ranks"] == most] for name in ("cases", "summary")}
    return figures | parts


def _as_stored(figures: Figures) -> Figures:
    return figures


# Page, then by name of a block: module with `print_figures`, file of figures, and the part that is shown.
PARTS: dict[str, dict[str, tuple[str, str, Callable[[Figures], Figures]]]] = {
    "results.md": {
        "runtime": ("benchmarks.runtime", "runtime-cpu", _as_stored),
        "megatron": ("benchmarks.megatron", "megatron-cpu", _as_stored),
        "host": ("benchmarks.host", "host-cpu", _as_stored),
        "planning": ("benchmarks.planning", "planning-cpu", _as_stored),
        "live": ("benchmarks.live", "live-cpu", _largest),
        "planners": ("benchmarks.planner", "planner", _one_case),
        "first": ("benchmarks.first_answer", "first-answer-cpu", _as_stored),
        "traces": ("benchmarks.traces", "traces-cpu", _as_stored),
        "payload": ("benchmarks.payload", "payload-cpu", _as_stored),
        "observing": ("benchmarks.observe", "observe-cpu", _as_stored),
        "capture": ("benchmarks.capture", "capture-cpu", _as_stored),
    },
    "t-ppo.md": {
        "tppo": ("benchmarks.t_ppo", "tppo-cpu", _as_stored),
        "tppo-trunk": ("benchmarks.t_ppo", "tppo-trunk-cpu", _as_stored),
    },
    "rollout.md": {"pipeline": ("benchmarks.rollout_figures", "rollout-cpu", _as_stored)},
    "advise.md": {"advice": ("benchmarks.advice", "advice", _as_stored)},
    "simulator.md": {"accuracy": ("experiments.simulator_validation", "simulator-cpu", _as_stored)},
}


class MarkdownConsole:
    """Takes what is printed to a `rich.console.Console`, as Markdown."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def print(self, *shown: Any, **_: Any) -> None:
        """Keeps tables and texts."""
        self.parts += [_table(each) if isinstance(each, Table) else Text.from_markup(each).plain for each in shown]
        self.parts = [part for part in self.parts if part]


def _table(table: Table) -> str:
    if not table.row_count:
        return ""
    columns = [list(column.cells) for column in table.columns]
    body = [[_cell(cell) for cell in row] for row in zip_longest(*columns, fillvalue="")]
    made = markdown_table([_cell(column.header) for column in table.columns], body)
    return "\n\n".join(filter(None, [f"*{table.title}*" if table.title else "", made, str(table.caption or "")]))


def _cell(cell: Any) -> str:
    return Text.from_markup(str(cell)).plain.strip()


def blocks(page: str) -> dict[str, str]:
    """The generated parts of a page of docs/, by name."""
    made = {}
    for name, (module, file, part) in PARTS[page].items():
        console = MarkdownConsole()
        figures = json.loads((DOCS / "benchmarks" / f"{file}.json").read_text(encoding="utf-8"))
        import_module(module).print_figures(part(figures), console)
        made[name] = "\n\n".join(console.parts)
    return made


if __name__ == "__main__":
    for name in PARTS:
        replace_tables(blocks(name), DOCS / name)
