"""The figures of `trimtab bench transfer` for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """The tables for people."""
    on = f"{figures['device']}, {figures['dtype']}"
    if figures["device"] == "cpu":
        console.print("No GPU here: smaller sizes on the CPU, which say nothing about one.")
    grouped = _table(f"A layer's experts, forward ({on})", "model", "experts", "tokens an expert", "time", "TFLOP/s")
    for row in figures["grouped"]:
        for point in row["tokens_per_expert"]:
            figures_of = (str(row["experts"]), str(point["tokens"]), f"{point['ms']:.3f} ms", f"{point['tflops']:.3g}")
            grouped.add_row(row["model"], *figures_of)
    host = _table(
        f"Host path ({on})",
        "model", "copies", "beside compute", "an expert", "compute", "beside copies", "slower",
    )  # fmt: skip
    for row in figures["host_path"]:
        host.add_row(
            row["model"],
            f"{row['gb_per_s']:.1f} GB/s",
            f"{row['gb_per_s_beside_compute']:.1f} GB/s",
            f"{row['expert_ms']:.3f} ms",
            f"{row['compute_ms']:.3f} ms",
            f"{row['compute_ms_beside_copies']:.3f} ms",
            f"{row['slowdown']:.1%}",
        )
    layer = _table(f"Planned layer ({on})", "model", "replicas", "waits for the GPU", "right", "time")
    for row in figures["planned_layer"]:
        layer.add_row(
            row["model"], str(row["replicas"]), row["waits_for_device"], _yes(row["right"]), f"{row['ms']:.3f} ms"
        )
    path = _table(
        f"Slowest rank's experts, forward and backward ({on})",
        "model", "ranks", "max/mean", "planned", "static", "planned", "even", "speed-up",
    )  # fmt: skip
    for row in figures["critical_path"]:
        path.add_row(
            row["model"],
            str(row["ranks"]),
            f"{row['max_over_mean_static']:.3f}",
            f"{row['max_over_mean_planned']:.3f}",
            *(f"{row[f'{kind}_ms']:.3f} ms" for kind in ("static", "planned", "even")),
            f"{row['speedup']:.2f}x",
        )
    for table in (grouped, host, layer, path):
        console.print(table)
    peers = figures["peer_path"]
    console.print(
        f"Peer path between {peers['ranks']} processes: "
        + (
            peers["problem"]
            if "problem" in peers
            else f"{peers['memory']}, right: {_yes(peers['right'])}, {peers['gb_per_s']:.1f} GB/s"
        )
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _yes(right: bool) -> str:
    return "yes" if right else "NO"
