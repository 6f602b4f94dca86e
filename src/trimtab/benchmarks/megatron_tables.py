"""The tables that `trimtab bench megatron` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from trimtab.benchmarks.figure_table import Columns, figure_table, named_rows, quantity
from trimtab.benchmarks.megatron_summary import RATIOS
from trimtab.report.number_text import seconds

STEPS: Columns = {"variant": "{name}", "median step": quantity("median_s", seconds), "CPU by rank": "{cpu}"}
SEEDS: Columns = {
    "seed": "{seed}",
    "max_vio": "{max_vio_before:.2f}",
    "planned": "{max_vio_after:.2f}",
    "replicas": "{replicas}",
    "plain": lambda row: seconds(row["median_s"]["plain_skewed"]),
    "planned step": lambda row: seconds(row["median_s"]["planned_skewed"]),
    "gain captured": "{gain_captured:.2f}",
}
FIGURES: Columns = {
    "figure": "{name}",
    "value": "{value:.3f}",
    "95% interval": lambda row: "{:.3f} to {:.3f}".format(*row["interval"]),
}
NOTES = (
    "overhead_when_balanced: planned Megatron's step time divided by plain Megatron's, minus 1, on even routing. "
    "gain_captured: the time that planning saves on skewed routing, divided by the time that the skew costs plain "
    "Megatron. It can exceed 1, since replicas also reduce the rows that ranks exchange. Planning, refreshing of "
    "weights and transfers are in the step time; recording of the routing is not.",
)


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """Print step times, those of each seed, the ratios and what they mean."""
    pairs = figures["settings"]["pairs"]
    version, ranks = figures["megatron_version"], figures["ranks"]
    console.print(f"Megatron-core {version} on {ranks} CPU ranks, {pairs} rounds of all variants")
    rows = [
        {**row, "cpu": ", ".join(map(seconds, figures["cpu_s_by_rank"][row["name"]]))}
        for row in named_rows(figures["variants"])
    ]
    console.print(figure_table("Step time", STEPS, rows))
    console.print(figure_table("Skewed routing, by seed", SEEDS, figures["seeds"]))
    rows = [{"name": name, "value": figures[name], "interval": figures[f"{name}_interval"]} for name in RATIOS]
    console.print(figure_table("Ratios", FIGURES, rows))
    console.print(f"worst relative error of a main_grad: {figures['worst_relative_error']:.1e}")
    console.print(*NOTES, sep="\n")
