"""The tables that `trimtab bench transfer` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from trimtab.benchmarks.figure_table import Cell, Columns, Row, figure_table, quantity
from trimtab.report.number_text import flops, rate, seconds


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """Print one table per part of the benchmark."""
    on = f"{figures['device']}, {figures['dtype']}"
    if figures["device"] == "cpu":
        console.print("No GPU here: smaller sizes on the CPU, which say nothing about a GPU.")
    grouped: Columns = {
        "model": "{model}",
        "experts": "{experts}",
        "tokens per expert": "{tokens}",
        "time": _ms("ms"),
        "rate": quantity("tflops", flops, 1e12),
    }
    points = [row | point for row in figures["grouped"] for point in row["tokens_per_expert"]]
    console.print(figure_table(f"A layer's experts, forward ({on})", grouped, points))
    host_path: Columns = {
        "model": "{model}",
        "copies": quantity("gb_per_s", rate, 1e9),
        "beside compute": quantity("gb_per_s_beside_compute", rate, 1e9),
        "per expert": _ms("expert_ms"),
        "compute": _ms("compute_ms"),
        "beside copies": _ms("compute_ms_beside_copies"),
        "slower": "{slowdown:.1%}",
    }
    console.print(figure_table(f"Host path ({on})", host_path, figures["host_path"]))
    planned_layer: Columns = {
        "model": "{model}",
        "replicas": "{replicas}",
        "waits for the GPU": "{waits_for_device}",
        "right": _is_right,
        "time": _ms("ms"),
    }
    console.print(figure_table(f"Planned layer ({on})", planned_layer, figures["planned_layer"]))
    critical_path: Columns = {
        "model": "{model}",
        "ranks": "{ranks}",
        "max/mean": "{max_over_mean_static:.3f}",
        "max/mean planned": "{max_over_mean_planned:.3f}",
        "static": _ms("static_ms"),
        "planned": _ms("planned_ms"),
        "even": _ms("even_ms"),
        "speed-up": "{speedup:.2f}x",
    }
    title = f"Slowest rank's experts, forward and backward ({on})"
    console.print(figure_table(title, critical_path, figures["critical_path"]))
    peers = figures["peer_path"]
    result = peers.get("problem") or f"{peers['memory']}, right: {_is_right(peers)}, {rate(peers['gb_per_s'] * 1e9)}"
    console.print(f"Peer path between {peers['ranks']} processes: {result}")


def _ms(key: str) -> Cell:
    return quantity(key, seconds, 1e-3)


def _is_right(row: Row) -> str:
    return "yes" if row["right"] else "NO"
