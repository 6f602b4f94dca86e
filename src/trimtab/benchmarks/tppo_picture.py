"""The picture of `trimtab bench t-ppo`: accuracy over decode steps, and over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

from trimtab.benchmarks.tppo_settings import ALGORITHMS
from trimtab.files import atomic_file

COLOURS = {"ppo": "#d97706", "grpo": "#9333ea", "t-ppo": "#0f766e"}
PANELS = {"decode_steps": "decode steps", "wall_s": "seconds on CPU ranks, without evaluations"}


def draw_curves(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the picture as SVG: a thin line for each run, and a thick one for the mean of an algorithm's runs."""
    # The same ids in every run, so that the file changes only when its figures do.
    plt.rcParams["svg.hashsalt"] = "trimtab"
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 3.6), sharey=True)
    for axis, (name, label) in zip(axes, PANELS.items(), strict=True):
        for algorithm in ALGORITHMS:
            curves = [
                np.array([[point[name], 100 * point["accuracy"]] for point in run["points"]])
                for run in runs
                if run["algorithm"] == algorithm
            ]
            for curve in curves:
                axis.plot(*curve.T, color=COLOURS[algorithm], linewidth=0.7, alpha=0.4)
            axis.plot(*np.mean(curves, axis=0).T, color=COLOURS[algorithm], linewidth=2.2, label=algorithm)
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out accuracy, %")
    axes[0].set_ylim(bottom=0)
    axes[0].legend()
    figure.tight_layout()
    with atomic_file(path) as file:
        figure.savefig(file, format=path.suffix.lstrip(".") or "svg", metadata={"Date": None})
    plt.close(figure)
