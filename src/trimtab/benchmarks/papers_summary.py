"""Trimtab against the best other balancer and the bound, over the cases and seeds of `trimtab bench papers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, mode
from typing import Any

from trimtab.planner.plan.pass_times import PARTS

Row = Mapping[str, Any]

TRIMTAB, BALANCED = "trimtab", "balanced"


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
