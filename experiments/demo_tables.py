"""`python -m experiments.demo_tables out/demo/summary.json`: store a run of `make demo`, and write its tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from experiments.page_tables import markdown_table, replace_tables
from trimtab.files import write_atomically
from trimtab.report.number_text import seconds

FIGURES = Path("docs/benchmarks/demo.json")
RESULTS = Path("docs/results.md")
POLICIES = ("static", "trimtab")


def blocks(figures: dict[str, Any]) -> dict[str, str]:
    """The part of the page, by name.

    Args:
        figures: those of `summary.json`.
    """
    comparison = figures["comparison"]
    accuracies = [[model, f"{part:.1%}"] for model, part in figures["held_out_accuracy"].items()]
    steps = len(comparison["static"]["step_s"])
    header = ["policy", "net step time, median", "speed-up (95% interval)", "max_vio", f"replicas in {steps} steps"]
    rows = [_row(name, comparison) for name in POLICIES]
    costs = [[seconds(comparison[name][time]) for time in ("planning_s", "waited_s")] for name in POLICIES]
    models = markdown_table(["model", "held-out accuracy"], accuracies)
    full = markdown_table(
        [*header, "planning of a step", "waiting for plans"],
        [[*row, *cost] for row, cost in zip(rows, costs, strict=True)],
    )
    equal = (
        f"Losses of the two trainers differ by {comparison['loss_difference']:.0e} at most, gradient norms by "
        f"{comparison['norm_difference']:.0e} of the norm."
    )
    about = f"One run on a 2-core CPU machine. {_sure(comparison)} Experts are a small part of this model's step."
    return {"demo-costs": "\n\n".join([models, full, about, equal])}


def _row(name: str, comparison: dict[str, Any]) -> list[str]:
    figures, (low, high) = comparison[name], comparison["speedup_interval"]
    ratio = "1.00x" if name == "static" else f"{comparison['speedup']:.2f}x ({low:.2f} to {high:.2f})"
    return [name, f"{figures['median_s']:.3f} s", ratio, f"{figures['max_vio']:.3f}", str(figures["replicas"])]


def _sure(comparison: dict[str, Any]) -> str:
    """Whether the steps show a gain."""
    low, high = comparison["speedup_interval"]
    if low > 1:
        return "The interval is above 1."
    if high < 1:
        return "Trimtab is slower: the interval is below 1."
    return "The interval includes 1: the run shows no sure gain."


def main(summary: Path) -> None:
    """Store the figures of `summary.json`, and write them into the page."""
    figures = json.loads(summary.read_text(encoding="utf-8"))
    write_atomically(FIGURES, json.dumps(figures, indent=1) + "\n")
    replace_tables(blocks(figures), RESULTS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
