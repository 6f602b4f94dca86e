"""Trimtab against the best other balancer and the bound, over the cases and seeds of `python -m benchmarks.papers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, mode
from typing import Any

from rich.console import Console

from benchmarks.harness import Figures
from benchmarks.tables import Cell, Columns, Row, figure_table, quantity
from trimtab.planner.plan.pass_times import PARTS
from trimtab.report.number_text import seconds as seconds_text

TRIMTAB, BALANCED = "trimtab", "balanced"
# Cases of the last table.
WORST = 5

CASES: Columns = {
    "case": "{case}",
    "trimtab": quantity("trimtab_s", seconds_text),
    "best other": lambda row: f"{row['best']} {seconds_text(row['best_s'])}" + ("" if row["best_fits"] else " *"),
    "ratio": "{ratio:+.2%}",
    "eplb": quantity("eplb_s", seconds_text),
    "static": quantity("static_s", seconds_text),
    "above bound": "{gap:.2%}",
}


def _target_text(name: str) -> Cell:
    def cell(row: Row) -> str:
        target, met = row[name]["target"], row[name]["met"]
        return "" if target is None else f"{target:+.1%}, {'met' if met else 'missed'}"

    return cell


SUMMARY: Columns = {
    "cases": "{group}",
    "planning": lambda row: "charged" if row["planning"] else "not charged",
    "mean": "{mean[value]:+.2%}",
    "at most": _target_text("mean"),
    "worst": "{worst[value]:+.2%}",
    "at most ": _target_text("worst"),
    "worst case": "{worst_case}, seed {worst_seed}",
    "worst median": "{worst_median[value]:+.2%}",
    "slower in": "{slower} of {pairs}",
}


def _gap(part: str) -> Cell:
    return lambda row: f"{row['gap_by_part'][part]:+.2%}"


GAPS: Columns = {"case": "{case}", "ratio": "{ratio:+.2%}", "above bound": "{gap:.2%}"}
# Parts that are nearer to the bound in all shown cases are left out.
LEAST_GAP = 0.00005


@dataclass(frozen=True)
class Group:
    """Cases whose ratios are summarised together. A ratio is Trimtab's step over the best other's, minus 1.

    Attributes:
        name: for tables.
        least_ranks, most_ranks: of the cases, inclusive.
        planning: whether all balancers are charged the planning that they can't hide.
        mean_target: most mean ratio; None if there is no target.
        worst_target: most ratio of any case and seed; None if there is no target.
    """

    name: str
    least_ranks: int
    most_ranks: int
    planning: bool
    mean_target: float | None
    worst_target: float | None


GROUPS = (
    Group("EP 8 to 16", 8, 16, True, -0.003, 0.002),
    Group("EP 8 to 16", 8, 16, False, None, None),
    Group("EP 32 to 128", 32, 128, True, -0.03, 0.002),
    Group("EP 32 to 128", 32, 128, False, -0.03, None),
)


def ratio(row: Row, *, planning: bool = True) -> float:
    """Trimtab's step time over that of the best other balancer, minus 1; without planning for both if not charged."""
    best = row["best_other" if planning else "best_other_without_planning"]
    return seconds(row, TRIMTAB, planning=planning) / seconds(row, best, planning=planning) - 1


def seconds(row: Row, name: str, *, planning: bool = True) -> float:
    """Step time of a balancer, with or without the planning that is on its critical path."""
    charged = 0.0 if planning else row["planning_s"].get(name, 0.0)
    return float(row["step_s"][name] - charged)


def gap_by_part(row: Row) -> dict[str, float]:
    """Trimtab's step above the bound, by part, as fractions of the bound; their sum is the whole gap."""
    bound_s, parts_s = row["bound_parts_s"], row["plans"][TRIMTAB]["parts_s"]
    whole_s = sum(bound_s.values())
    return {part: (parts_s[part] - bound_s[part]) / whole_s for part in PARTS}


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Mean and worst ratio of every group that has cases, with targets and whether they are met.

    `worst_median` is the largest median of a case over its seeds; `slower` is the number of pairs (case, seed) in which
    the best other balancer is faster.
    """
    found = []
    for group in GROUPS:
        mine = [row for row in rows if group.least_ranks <= row["ranks"] <= group.most_ranks]
        if not mine:
            continue
        ratios = [ratio(row, planning=group.planning) for row in mine]
        worst = max(range(len(mine)), key=lambda i: ratios[i])
        found.append(
            {
                "group": group.name,
                "planning": group.planning,
                "mean": _target(fmean(ratios), group.mean_target),
                "worst": _target(ratios[worst], group.worst_target),
                "worst_case": mine[worst]["case"],
                "worst_seed": mine[worst]["seed"],
                "worst_median": _target(max(_case_medians(mine, ratios)), group.worst_target),
                "slower": sum(each > 0 for each in ratios),
                "pairs": len(ratios),
            }
        )
    return found


def _case_medians(rows: Sequence[Row], ratios: Sequence[float]) -> list[float]:
    by_case: dict[str, list[float]] = {}
    for row, each in zip(rows, ratios, strict=True):
        by_case.setdefault(row["case"], []).append(each)
    return [median(each) for each in by_case.values()]


def _target(value: float, target: float | None) -> dict[str, Any]:
    return {"value": round(value, 6), "target": target, "met": None if target is None else value <= target}


def medians(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One row for each case, in their order: medians over its seeds.

    `best` is the balancer that is most often the best other, and `best_fits` whether it fits a rank's memory in all
    seeds; `best_s` are the seconds of the best other in each seed.
    """
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)
    found = []
    for case, mine in by_case.items():
        best = mode(row["best_other"] for row in mine)
        found.append(
            {
                "case": case,
                "best": best,
                "best_fits": not any(best in row["does_not_fit"] for row in mine),
                "best_s": median(seconds(row, row["best_other"]) for row in mine),
                **{f"{name}_s": median(seconds(row, name) for row in mine) for name in (TRIMTAB, "eplb", "static")},
                "ratio": median(ratio(row) for row in mine),
                "gap": median(sum(gap_by_part(row).values()) for row in mine),
                "gap_by_part": {part: median(gap_by_part(row)[part] for row in mine) for part in PARTS},
            }
        )
    return found


def print_figures(figures: Figures, console: Console) -> None:
    """Print all cases, the summary with its targets, and the gap to the bound of the worst cases by part."""
    rows = medians(figures["cases"])
    seeds = ", ".join(map(str, figures["seeds"]))
    console.print(f"presets, other balancers and planning times of yardstick {figures['yardstick']}; seeds {seeds}")
    caption = (
        "ratio: trimtab's time over the best other's, minus 1; above bound: over the lower bound of trimtab's schedule "
        "and slots; *: needs more memory than a rank has, in stages of the traced layers"
    )
    console.print(figure_table("Simulated step time, median over seeds", CASES, rows, caption=caption))
    caption = (
        "negative: trimtab is faster; not charged: without planning on the critical path, for all balancers; worst "
        "median: of a case over its seeds; slower in: pairs of case and seed"
    )
    title = "Ratio to the best other balancer, over all cases and seeds"
    console.print(figure_table(title, SUMMARY, figures["summary"], caption=caption))
    worst = sorted(rows, key=lambda row: -row["ratio"])[:WORST]
    title = "Worst cases by ratio: time above the bound by part, in parts of the bound"
    parts = [part for part in PARTS if any(abs(row["gap_by_part"][part]) >= LEAST_GAP for row in worst)]
    caption = "medians over seeds; parts that are not shown take their least time"
    console.print(figure_table(title, {**GAPS, **{part: _gap(part) for part in parts}}, worst, caption=caption))
