"""The tables that `trimtab bench papers` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from trimtab.benchmarks.figure_table import Cell, Columns, figure_table, quantity
from trimtab.benchmarks.papers_summary import medians
from trimtab.planner.plan.pass_times import PARTS
from trimtab.report.number_text import seconds

# Cases of the last table.
WORST = 5

CASES: Columns = {
    "case": "{case}",
    "trimtab": quantity("trimtab_s", seconds),
    "best other": lambda row: f"{row['best']} {seconds(row['best_s'])}" + ("" if row["best_fits"] else " *"),
    "ratio": "{ratio:+.2%}",
    "eplb": quantity("eplb_s", seconds),
    "static": quantity("static_s", seconds),
    "above bound": "{gap:.2%}",
}


def _target(name: str) -> Cell:
    def cell(row: Any) -> str:
        target, met = row[name]["target"], row[name]["met"]
        return "" if target is None else f"{target:+.1%}, {'met' if met else 'missed'}"

    return cell


SUMMARY: Columns = {
    "cases": "{group}",
    "planning": lambda row: "charged" if row["planning"] else "not charged",
    "mean": "{mean[value]:+.2%}",
    "at most": _target("mean"),
    "worst": "{worst[value]:+.2%}",
    "at most ": _target("worst"),
    "worst case": "{worst_case}, seed {worst_seed}",
    "worst median": "{worst_median[value]:+.2%}",
    "slower in": "{slower} of {pairs}",
}


def _gap(part: str) -> Cell:
    return lambda row: f"{row['gap_by_part'][part]:+.2%}"


GAPS: Columns = {"case": "{case}", "ratio": "{ratio:+.2%}", "above bound": "{gap:.2%}"}
# Parts that are nearer to the bound in all shown cases are left out.
LEAST_GAP = 0.00005


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """Print all cases, the summary with its targets, and the gap to the bound of the worst cases by part."""
    rows = medians(figures["cases"])
    seeds = ", ".join(map(str, figures["seeds"]))
    console.print(f"presets, other balancers and planning times of yardstick {figures['yardstick']}; seeds {seeds}")
    table = figure_table("Simulated step time, median over seeds", CASES, rows)
    table.caption = (
        "ratio: trimtab's time over the best other's, minus 1; above bound: over the lower bound of trimtab's schedule "
        "and slots; *: needs more memory than a rank has, in stages of the traced layers"
    )
    console.print(table)
    table = figure_table("Ratio to the best other balancer, over all cases and seeds", SUMMARY, figures["summary"])
    table.caption = (
        "negative: trimtab is faster; not charged: without planning on the critical path, for all balancers; worst "
        "median: of a case over its seeds; slower in: pairs of case and seed"
    )
    console.print(table)
    worst = sorted(rows, key=lambda row: -row["ratio"])[:WORST]
    title = "Worst cases by ratio: time above the bound by part, in parts of the bound"
    parts = [part for part in PARTS if any(abs(row["gap_by_part"][part]) >= LEAST_GAP for row in worst)]
    table = figure_table(title, {**GAPS, **{part: _gap(part) for part in parts}}, worst)
    table.caption = "medians over seeds; parts that are not shown take their least time"
    console.print(table)
