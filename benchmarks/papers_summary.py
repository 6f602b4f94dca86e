"""Trimtab against the best other balancer and the bound, over the cases and seeds of `python -m benchmarks.papers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, mode
from typing import Any

from rich.console import Console

from benchmarks.harness import Figures
from benchmarks.tables import Columns, Row, figure_table, quantity
from experiments.page_tables import markdown_table
from trimtab.report.number_text import seconds as seconds_text

TRIMTAB, BALANCED = "trimtab", "balanced"
# A case is behind another balancer if its median ratio is above this.
BEHIND = 0.005
# Of predictions, as a part of the simulated time.
NEAR = 0.03
COLUMNS: Columns = {
    "case": "{case}",
    "`trimtab`": quantity("trimtab_s", seconds_text),
    "best other": lambda row: f"`{row['best']}`",
    "ratio": "{ratio:+.2%}",
    "with our slots": lambda row: f"`{row['alike']}`",
    "its ratio": "{alike_ratio:+.2%}",
    "over `eplb`": "{over_eplb:.2f}x",
    "over `scheduled`": "{over_scheduled:.2f}x",
    "over `static`": "{over_static:.2f}x",
    "above bound": "{gap:.1%}",
}
SUMMARY: Columns = {
    "cases": "{group}",
    "number": "{count}",
    "median": "{median:+.2%}",
    "worst": "{worst:+.2%}",
    "behind": "{behind}",
    "median, our slots": "{alike_median:+.2%}",
    "worst, our slots": "{alike_worst:+.2%}",
    "behind, our slots": "{alike_behind}",
    "over `eplb`": "{over_eplb:.2f}x",
    "over `static`": "{over_static:.2f}x",
}


@dataclass(frozen=True)
class Group:
    """Cases that are summarised together."""

    name: str
    has: Callable[[Row], bool]


GROUPS = (
    Group("all", lambda row: True),
    Group("one domain of fast links", lambda row: row["nodes"] == 1),
    Group("several domains, tokens sent", lambda row: row["nodes"] > 1 and row["forwards"]),
    Group("several domains, rows sent", lambda row: row["nodes"] > 1 and not row["forwards"]),
    Group("hot experts change between steps", lambda row: row["preset"] == "drift"),
)


def ratio(row: Row, other: str = "best_other") -> float:
    """Trimtab's step time over that of the best other balancer, minus 1: negative if Trimtab is faster.

    Args:
        other: key of the other's name; "best_with_our_slots" for the best with no more slots.
    """
    return float(row["step_s"][TRIMTAB] / row["step_s"][row[other]] - 1)


def medians(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One row for each case, in their order: medians over its seeds.

    `best` and `alike` are the balancers that are most often the best other of all that fit, and of those with no more
    slots.
    """
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)
    found = []
    for case, mine in by_case.items():
        over = {
            f"over_{name}": median(row["step_s"][name] / row["step_s"][TRIMTAB] for row in mine)
            for name in ("eplb", "scheduled", "static")
        }
        found.append(
            {
                "case": case,
                "nodes": mine[0]["nodes"],
                "forwards": mine[0]["forwards"],
                "preset": mine[0]["preset"],
                "trimtab_s": median(row["step_s"][TRIMTAB] for row in mine),
                "best": mode(row["best_other"] for row in mine),
                "ratio": median(map(ratio, mine)),
                "alike": mode(row["best_with_our_slots"] for row in mine),
                "alike_ratio": median(ratio(row, "best_with_our_slots") for row in mine),
                **over,
                "gap": median(row["above_bound"] for row in mine),
                "predicted": max((row["predicted"] for row in mine), key=abs),
            }
        )
    return found


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of every group that has cases: the median and the largest of their median ratios, and how many are behind."""
    cases, found = medians(rows), []
    for group in GROUPS:
        mine = [case for case in cases if group.has(case)]
        if mine:
            summary: dict[str, Any] = {"group": group.name, "count": len(mine)}
            for prefix, key in (("", "ratio"), ("alike_", "alike_ratio")):
                ratios = [case[key] for case in mine]
                summary[f"{prefix}median"] = round(median(ratios), 6)
                summary[f"{prefix}worst"] = round(max(ratios), 6)
                summary[f"{prefix}behind"] = sum(each > BEHIND for each in ratios)
            for name in ("eplb", "static"):
                summary[f"over_{name}"] = round(median(case[f"over_{name}"] for case in mine), 4)
            found.append(summary)
    return found


def print_figures(figures: Figures, console: Console) -> None:
    """Print all cases and the summary."""
    seeds = ", ".join(map(str, figures["seeds"]))
    console.print(f"presets, other balancers and planning times of yardstick {figures['yardstick']}; seeds {seeds}")
    caption = "ratio: trimtab's time over the other's, minus 1"
    cases = sorted(medians(figures["cases"]), key=lambda row: -row["ratio"])
    console.print(figure_table("Simulated step time, median over seeds", COLUMNS, cases, caption=caption))
    console.print(figure_table("Ratio to the best other balancer", SUMMARY, figures["summary"]))


def page_blocks(figures: Figures) -> dict[str, str]:
    """The generated parts of docs/results.md, by name."""
    cases = sorted(medians(figures["cases"]), key=lambda row: -row["ratio"])
    farthest = max((case["predicted"] for case in cases), key=abs)
    count, seeds = len(cases), len(figures["seeds"])
    steps = figures["settings"]["sizes"]["steps"] - 1
    near = sum(abs(row["predicted"]) <= NEAR for row in figures["cases"])
    about = (
        f"{count} cases, {seeds} seeds each, mean of {steps} steps. The planner's prediction of the last step is "
        f"within {NEAR:.0%} of the simulated time in {near} of {len(figures['cases'])} simulations, and at most "
        f"{abs(farthest):.1%} from the simulated time."
    )
    behind = [
        f"`{case['case']}` ({case['alike_ratio']:+.1%}, `{case['alike']}`)"
        for case in cases
        if case["alike_ratio"] > BEHIND
    ]
    behind_text = f"Behind others with the same slots by more than {BEHIND:.1%}: {', '.join(behind) or 'in no case'}."
    return {
        "papers": f"{behind_text} {about}\n\n{_markdown(SUMMARY, figures['summary'])}",
        "cases": _markdown(COLUMNS, cases),
    }


def _markdown(columns: Columns, rows: Sequence[Row]) -> str:
    cells = [
        [cell.format_map(row) if isinstance(cell, str) else cell(row) for cell in columns.values()] for row in rows
    ]
    return markdown_table([*columns], cells)
