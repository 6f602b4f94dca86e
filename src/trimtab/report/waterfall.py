"""A waterfall: how a step's seconds change from doing nothing to a strategy. Its parts add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.report.number_text import seconds
from trimtab.report.table_data import Row, TableData
from trimtab.simulator.pipeline import BUBBLE
from trimtab.simulator.step import SEQUENCES, WAITING, SimulatedStep

# Causes of a change, and the causes of `SimulatedStep.causes_s` that it has.
CHANGES = {
    "waiting": (WAITING,),
    "sequences": (SEQUENCES,),
    "moves": ("migration",),
    "copies": ("transfers",),
    "planning": ("planning",),
    "rows": ("dispatch",),
    "bubble": (BUBBLE,),
    "other": ("attention", "experts", "optimizer"),
}
ABOUT = {
    "waiting": "for the busiest rank's experts",
    "sequences": "uneven sequences",
    "moves": "homes and mirrors",
    "copies": "weights and gradients of replicas",
    "planning": "that ranks wait for",
    "rows": "dispatch and combine",
    "bubble": "of the pipeline",
    "other": "experts, dense parts, optimizer",
}


@dataclass(frozen=True)
class WaterfallRow:
    """A total, or a change from the row before.

    Attributes:
        seconds: of the total, or the change.
        after: seconds of the step with this and all earlier changes.
        is_total: whether it is a total.
    """

    name: str
    seconds: float
    after: float
    is_total: bool = False


def waterfall_rows(before: SimulatedStep, after: SimulatedStep, name: str) -> list[WaterfallRow]:
    """From a step of `static` to one of the strategy `name`. The changes add up to the difference.

    `bubble` is one only with a pipeline.
    """
    rows = [WaterfallRow("static", before.step_time_s, before.step_time_s, is_total=True)]
    now = before.step_time_s
    for change, causes in CHANGES.items():
        if not set(causes) <= before.causes_s.keys():
            continue
        difference = sum(after.causes_s[cause] - before.causes_s[cause] for cause in causes)
        now += difference
        rows.append(WaterfallRow(change, difference, now))
    return [*rows, WaterfallRow(name, after.step_time_s, after.step_time_s, is_total=True)]


def waterfall_table(rows: Sequence[WaterfallRow], span: float) -> TableData:
    """The rows as a table; changes have a sign."""

    def text(row: WaterfallRow) -> str:
        sign = "" if row.is_total or row.seconds < 0 else "+"
        return f"{sign}{seconds(row.seconds, span)}"

    largest = max(row.after for row in rows) or 1.0
    return TableData(
        f"From static to {rows[-1].name}",
        ("cause", "change", "step"),
        tuple(
            Row(row.name, (text(row), seconds(row.after, span)), about=ABOUT.get(row.name, ""), is_ours=row is rows[-1],
                bar=None if not row.is_total else row.seconds / largest)
            for row in rows
        ),
    )  # fmt: skip
