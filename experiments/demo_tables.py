"""`python -m experiments.demo_tables out/demo/summary.json [MORE]`: store a run of `make demo`, and write its tables.

MORE are summaries of runs with other seeds.
"""

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
    about = (
        f"One run on a 2-core CPU machine. {_sure(comparison)} Experts of the busiest rank are "
        f"{comparison['busiest_part']:.0%} of a static step, so that even loads alone could make it "
        f"{comparison['possible_speedup']:.2f}x as fast."
    )
    seeds = [_seed_row(number, run) for number, run in enumerate(figures["seeds"])]
    other = markdown_table(
        [
            "seed",
            "speed-up (95% interval)",
            "max_vio of static",
            "busiest rank's experts",
            "possible",
            "of its gain",
            "accuracy",
        ],
        seeds,
    )
    return {"demo-costs": "\n\n".join([models, full, about, "The same with other seeds:", other, equal])}


def _seed_row(seed: int, run: dict[str, Any]) -> list[str]:
    before, after = run["held_out_accuracy"].values()
    low, high = run["speedup_interval"]
    return [
        str(seed), f"{run['speedup']:.2f}x ({low:.2f} to {high:.2f})", f"{run['max_vio']:.2f}",
        f"{run['busiest_part']:.0%}", f"{run['possible_speedup']:.2f}x",
        f"{(run['speedup'] - 1) / (run['possible_speedup'] - 1):.0%}", f"{before:.1%} to {after:.1%}",
    ]  # fmt: skip


def of_seed(summary: dict[str, Any]) -> dict[str, Any]:
    """The figures of one seed's run that are stored."""
    comparison = summary["comparison"]
    kept = {name: comparison[name] for name in ("speedup", "speedup_interval", "busiest_part", "possible_speedup")}
    return kept | {"max_vio": comparison["static"]["max_vio"], "held_out_accuracy": summary["held_out_accuracy"]}


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


def main(*summaries: Path) -> None:
    """Store the figures of each `summary.json`, the first in full, and write them into the page."""
    runs = [json.loads(summary.read_text(encoding="utf-8")) for summary in summaries]
    figures = runs[0] | {"seeds": [of_seed(run) for run in runs]}
    write_atomically(FIGURES, json.dumps(figures, indent=1) + "\n")
    replace_tables(blocks(figures), RESULTS)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
