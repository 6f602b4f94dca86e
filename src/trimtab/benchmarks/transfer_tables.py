"""The tables that `trimtab bench transfer` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from trimtab.benchmarks.figure_table import Columns, Row, figure_table


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """Print one table per part of the benchmark."""
    on = f"{figures['device']}, {figures['dtype']}"
    if figures["device"] == "cpu":
        console.print("No GPU here: smaller sizes on the CPU, which say nothing about a GPU.")
    grouped = {
        "model": "{model}",
        "experts": "{experts}",
        "tokens per expert": "{tokens}",
        "time": "{ms:.3f} ms",
        "TFLOP/s": "{tflops:.3g}",
    }
    points = [row | point for row in figures["grouped"] for point in row["tokens_per_expert"]]
    console.print(figure_table(f"A layer's experts, forward ({on})", grouped, points))
    host_path = {
        "model": "{model}",
        "copies": "{gb_per_s:.1f} GB/s",
        "beside compute": "{gb_per_s_beside_compute:.1f} GB/s",
        "per expert": "{expert_ms:.3f} ms",
        "compute": "{compute_ms:.3f} ms",
        "beside copies": "{compute_ms_beside_copies:.3f} ms",
        "slower": "{slowdown:.1%}",
    }
    console.print(figure_table(f"Host path ({on})", host_path, figures["host_path"]))
    planned_layer: Columns = {
        "model": "{model}",
        "replicas": "{replicas}",
        "waits for the GPU": "{waits_for_device}",
        "right": _is_right,
        "time": "{ms:.3f} ms",
    }
    console.print(figure_table(f"Planned layer ({on})", planned_layer, figures["planned_layer"]))
    critical_path = {
        "model": "{model}",
        "ranks": "{ranks}",
        "max/mean": "{max_over_mean_static:.3f}",
        "max/mean planned": "{max_over_mean_planned:.3f}",
        "static": "{static_ms:.3f} ms",
        "planned": "{planned_ms:.3f} ms",
        "even": "{even_ms:.3f} ms",
        "speed-up": "{speedup:.2f}x",
    }
    title = f"Slowest rank's experts, forward and backward ({on})"
    console.print(figure_table(title, critical_path, figures["critical_path"]))
    peers = figures["peer_path"]
    rates = "{memory}, right: {right}, {gb_per_s:.1f} GB/s"
    result = peers["problem"] if "problem" in peers else rates.format_map(peers | {"right": _is_right(peers)})
    console.print(f"Peer path between {peers['ranks']} processes: {result}")


def _is_right(row: Row) -> str:
    return "yes" if row["right"] else "NO"
