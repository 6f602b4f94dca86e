"""The tables that `trimtab bench runtime` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from trimtab.benchmarks.figure_table import figure_table


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """Print step times, their ratios, and what transfers cost on each path."""
    skew = figures["static_max_over_mean"]
    steps = {
        "variant": lambda row: row["name"],
        "median step": lambda row: f"{row['median_s'] * 1e3:.1f} ms",
        "of it in MoE": lambda row: f"{row['moe_s'] * 1e3:.1f} ms",
        "CPU a rank": lambda row: f"{row['cpu_s_per_rank'] * 1e3:.1f} ms",
    }
    title = (
        f"One micro-step, {figures['settings']['rounds']} alternating rounds; static max/mean by layer "
        f"{min(skew):.2f} to {max(skew):.2f}"
    )
    console.print(figure_table(title, steps, _named(figures["policies"])))
    ratios = [
        {"name": name, "median": figures[name], "low": interval[0], "high": interval[1]}
        for name, interval in ((key.removesuffix("_interval"), figures[key]) for key in figures if "_interval" in key)
    ]
    columns = {"ratio": "{name}", "median": "{median:.3f}", "95% interval": "[{low:.3f}, {high:.3f}]"}
    console.print(figure_table("Ratios of step times in each round", columns, ratios))
    transfers = {
        "paths": lambda row: row["name"],
        "exposed": lambda row: f"{row['exposed_s'] * 1e3:.1f} ms",
        "of MoE time": lambda row: "{:.2%} [{:.2%}, {:.2%}]".format(
            row["exposed_fraction"], *row["exposed_fraction_interval"]
        ),
        "peer": lambda row: f"{row['peer_bytes'] / 1e6:.1f} MB",
        "host": lambda row: f"{row['host_bytes'] / 1e6:.1f} MB",
    }
    console.print(figure_table("Transfers of replica weights", transfers, _named(figures["transfer"])))


def _named(figures: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": name} | row for name, row in figures.items()]
