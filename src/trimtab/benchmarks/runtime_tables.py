"""The tables that `trimtab bench runtime` prints."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console

from trimtab.benchmarks.figure_table import Columns, figure_table, named_rows, quantity, with_interval
from trimtab.report.number_text import bytes_text, seconds

STEPS: Columns = {
    "variant": "{name}",
    "median step": quantity("median_s", seconds),
    "of it in MoE": quantity("moe_s", seconds),
    "CPU per rank": quantity("cpu_s_per_rank", seconds),
}
SEEDS: Columns = {
    "seed": "{seed}",
    "max/mean": lambda row: f"{statistics.mean(row['static_max_over_mean']):.2f}",
    "static": lambda row: seconds(row["median_s"]["static"]),
    "trimtab": lambda row: seconds(row["median_s"]["trimtab"]),
    "balanced": lambda row: seconds(row["median_s"]["balanced"]),
    "gain captured": "{gain_captured:.2f}",
    "of balanced": "{fraction_of_balanced:.2f}",
}
FIGURES: Columns = {
    "figure": "{name}",
    "median": "{median:.2f}",
    "of the seeds": "{range[0]:.2f} to {range[1]:.2f}",
    "95% interval": lambda row: "{:.2f} to {:.2f}".format(*row["interval"]) if "interval" in row else "",
}
TRANSFERS: Columns = {
    "paths": "{name}",
    "exposed": quantity("exposed_s", seconds),
    "of MoE time": with_interval("exposed_fraction", "{:.2%}"),
    "peer": quantity("peer_bytes", bytes_text),
    "host": quantity("host_bytes", bytes_text),
}
NOTES = (
    "gain_captured and fraction_of_balanced can exceed 1: the step with even routing is not the fastest possible one. "
    "A replica of a hot expert computes rows of its own rank, which even routing sends to another rank, and the rows "
    "of a few hot experts make larger matrix products than as many rows spread evenly. On a seed that is nearly even "
    "there is little to gain, and gain_captured is mostly noise.",
    "overhead_when_balanced includes passes over the rows in memory that transformers' all-to-all makes and Trimtab "
    "does not, such as sorting received rows once more. They take long on a CPU. It says nothing about GPUs.",
)


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """Print step times, those of each seed, their ratios with what they mean, and what transfers cost on each path."""
    rounds, seeds = figures["settings"]["rounds"], len(figures["seeds"])
    console.print(f"One micro-step: {rounds} rounds of all variants on the skewed routing of seeds 0 to {seeds - 1}")
    console.print(figure_table("Step time, all seeds", STEPS, named_rows(figures["policies"])))
    console.print(figure_table("By seed; max/mean: mean over layers, under static", SEEDS, figures["seeds"]))
    rows = [_row(figures, key.removesuffix("_range")) for key in figures if key.endswith("_range")]
    console.print(figure_table("Over seeds: median, lowest and highest", FIGURES, rows))
    console.print(figure_table("Transfers of replica weights", TRANSFERS, named_rows(figures["transfer"])))
    console.print(*NOTES, sep="\n")


def _row(figures: dict[str, Any], name: str) -> dict[str, Any]:
    row = {"name": name, "median": figures[name], "range": figures[f"{name}_range"]}
    if f"{name}_interval" in figures:
        row["interval"] = figures[f"{name}_interval"]
    return row
