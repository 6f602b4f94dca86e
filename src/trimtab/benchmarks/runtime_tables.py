"""The tables that `trimtab bench runtime` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from trimtab.benchmarks.figure_table import Columns, figure_table, named_rows, scaled, with_interval

STEPS: Columns = {
    "variant": "{name}",
    "median step": scaled("median_s", 1e3, "{:.1f} ms"),
    "of it in MoE": scaled("moe_s", 1e3, "{:.1f} ms"),
    "CPU per rank": scaled("cpu_s_per_rank", 1e3, "{:.1f} ms"),
}
TRANSFERS: Columns = {
    "paths": "{name}",
    "exposed": scaled("exposed_s", 1e3, "{:.1f} ms"),
    "of MoE time": with_interval("exposed_fraction", "{:.2%}"),
    "peer": scaled("peer_bytes", 1e-6, "{:.1f} MB"),
    "host": scaled("host_bytes", 1e-6, "{:.1f} MB"),
}


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """Print step times, their ratios, and what transfers cost on each path."""
    skew = figures["static_max_over_mean"]
    rounds = figures["settings"]["rounds"]
    console.print(
        f"One micro-step, {rounds} alternating rounds; static max/mean by layer {min(skew):.2f} to {max(skew):.2f}"
    )
    console.print(figure_table("Step time", STEPS, named_rows(figures["policies"])))
    for name in (key.removesuffix("_interval") for key in figures if key.endswith("_interval")):
        console.print(f"{name}: {with_interval(name, '{:.3f}')(figures)}")
    console.print(figure_table("Transfers of replica weights", TRANSFERS, named_rows(figures["transfer"])))
