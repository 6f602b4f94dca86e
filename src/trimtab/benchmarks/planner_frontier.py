"""The picture of balance against replica bytes: one panel per case, one curve per balancer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from trimtab.files import atomic_file

STYLES: dict[str, dict[str, Any]] = {
    "trimtab": {"color": "#0f766e", "marker": "o", "linewidth": 2},
    "ultraep": {"color": "#d97706", "marker": "^"},
    "llep": {"color": "#9333ea", "marker": "v"},
}


def draw_frontier(points: list[dict[str, Any]], path: Path) -> None:
    """Write the picture as SVG. Lower left is better."""
    panels = list(dict.fromkeys((point["ranks"], point["experts"], point["trace"]) for point in points))
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    # The same ids in every run, so that the file changes only when its figures do.
    plt.rcParams["svg.hashsalt"] = "trimtab"
    figure, axes = plt.subplots(rows, columns, figsize=(5.5 * columns, 3.4 * rows), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        ranks, experts, trace = panel
        for name, style in STYLES.items():
            mine = [p for p in points if (p["ranks"], p["experts"], p["trace"]) == panel and p["curve"] == name]
            axis.plot(
                [point["replica_bytes_per_instance"] / 1e6 for point in mine],
                [point["max_over_mean_mean"] for point in mine],
                label=name,
                markersize=4,
                **style,
            )
        axis.set_title(f"{ranks} ranks, {experts} experts, {trace}", fontsize=10)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("replica weights moved, MB per instance")
    for axis in axes[:, 0]:
        axis.set_ylabel("max/mean rank load")
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    axes.flat[0].legend(fontsize=8)
    figure.tight_layout()
    with atomic_file(path) as file:
        figure.savefig(file, format=path.suffix.lstrip(".") or "svg", metadata={"Date": None})
    plt.close(figure)
