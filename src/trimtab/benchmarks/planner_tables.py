"""The tables that `trimtab bench planner` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from trimtab.benchmarks.figure_table import Cell, Columns, figure_table, quantity
from trimtab.benchmarks.planner_curves import COMPARED_BALANCE, RIVALS
from trimtab.report.number_text import bytes_text, seconds

CASE = "{ranks}/{experts} {trace}"
BALANCERS: Columns = {
    "policy": "{policy}",
    "max/mean": "{max_over_mean_mean:.3f}",
    "p99": "{max_over_mean_p99:.3f}",
    "gap": lambda row: "" if row["gap_to_bound_mean"] is None else f"{row['gap_to_bound_mean']:.1%}",
    "replicas": "{replicas_per_instance:.1f}",
    "far": "{far_replicas_per_instance:.1f}",
    "crossing": "{cross_node_token_fraction:.1%}",
    "predicted": quantity("predicted_ms_per_instance", seconds, 1e-3),
    "planning": quantity("us_per_instance", seconds, 1e-6),
}
SCHEDULES: Columns = {
    "case": CASE,
    "time saved": "{expert_time_saved:.1%}",
    "threshold": "{threshold}",
    "replicas by length": "{replicas_by_length:.2f}",
    "by routing": "{replicas_by_routing:.2f}",
    "search": quantity("seconds", seconds),
}


def _bytes(curve: str) -> Cell:
    def cell(row: Any) -> str:
        nbytes = row["bytes_per_instance"][curve]
        return "never" if nbytes is None else bytes_text(nbytes)

    return cell


FRONTIER: Columns = {
    "case": CASE,
    **{name: _bytes(name) for name in ("trimtab", *RIVALS)},
    **{f"above {name}": f"{{trimtab_above[{name}]:+.4f}}" for name in RIVALS},
}


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """Print one table per case and terms, and those of schedules, frontier and fewest replicas."""
    console.print(f"presets, other balancers and planning times of yardstick {figures['yardstick']}")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for case in figures["cases"]:
        key = tuple(case[name] for name in ("ranks", "experts", "trace", "slots", "terms"))
        groups.setdefault(key, []).append(case)
    for (ranks, experts, trace, slots, terms), cases in groups.items():
        recipe = "each on its own recipe" if terms == "own" else "equal terms: same homes, schedule and slots"
        title = f"{ranks} ranks, {experts} experts, {trace}, slots per rank: {slots}; {recipe}"
        table = figure_table(title, BALANCERS, cases, bold="trimtab")
        table.caption = (
            "gap: over the LP bound; far: replicas on other nodes; crossing: rows between nodes; "
            "predicted, planning: time of the instance and of its planning; all per instance"
        )
        console.print(table)
    title = "Sequences grouped by routing against packed by length, at the same homes"
    console.print(figure_table(title, SCHEDULES, figures["schedule"]))
    if figures["frontier_compared"]:
        title = f"Replica weights for max/mean {COMPARED_BALANCE}, per instance; two slots per rank"
        table = figure_table(title, FRONTIER, figures["frontier_compared"])
        table.caption = "above: the largest excess of trimtab's max/mean over the rival's at the same bytes"
        console.print(table)
    for milp in figures["milp"]:
        over = milp["replicas"] / milp["fewest"] - 1 if milp["fewest"] else 0.0
        text = (
            "{ranks}/{experts} {trace}, {homes} homes: {replicas} replicas for max/mean {threshold}, {fewest} are the "
            "fewest ({over:+.1%}; {solved} of {sampled} instances)"
        )
        console.print(text.format(**milp, over=over))
