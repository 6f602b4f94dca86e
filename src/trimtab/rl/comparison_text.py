"""A comparison in words and figures: the printed table, its result in one sentence, and `summary.json`."""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table

from trimtab.report.number_text import seconds
from trimtab.rl.paired_comparison import PairedComparison


def comparison_table(comparison: PairedComparison) -> Table:
    """Medians of both policies, and the sums of replicas and moves over all steps."""
    headers = ("step time", "max_vio", "replicas", "moved", "planning", "waiting")
    table = Table(
        "policy",
        *(Column(name, justify="right") for name in headers),
        title=f"Net step time, medians of {len(comparison.static.step_s)} training steps",
        title_justify="left",
    )
    for name, policy in comparison.policies.items():
        counts = (f"{policy.total(metric):,}" for metric in ("moe/replicas", "moe/homes_moved"))
        times = (seconds(policy.median(metric)) for metric in ("planning_s", "waited_s"))
        table.add_row(name, f"{policy.median_s:.3f} s", f"{policy.median('moe/max_vio_after'):.3f}", *counts, *times)
    return table


def answer(comparison: PairedComparison) -> str:
    """The result in two or three sentences; if nothing is gained, they say so."""
    static, balanced = comparison.static, comparison.balanced
    ratio, (low, high) = comparison.speedup
    measured = f"{ratio:.2f} times as fast as static expert parallelism (95% interval {low:.2f} to {high:.2f})"
    loads = (
        f"The busiest rank has {balanced.median('moe/max_vio_after'):.1%} more than the mean instead of "
        f"{static.median('moe/max_vio_after'):.1%}."
    )
    if low > 1:
        return f"With planning and moves in the clock, Trimtab makes a training step {measured}. {loads}"
    result = "Trimtab is slower here" if high < 1 else "no sure gain is measured here"
    return f"With planning and moves in the clock, {result}: a training step is {measured}. {loads}"


def possible(comparison: PairedComparison) -> str:
    """What even loads could gain in this model's step."""
    return (
        f"Experts of the busiest rank are {comparison.busiest_part:.0%} of a static step: with even loads, and nothing "
        f"else changed, it would be {comparison.possible_speedup:.2f} times as fast."
    )


def check(comparison: PairedComparison) -> str:
    """How far losses and gradient norms of the two trainers differ."""
    return (
        f"Both trainers compute the same step: losses differ by {comparison.loss_difference:.1g} at most, norms of "
        f"gradients by {comparison.norm_difference:.1g} of the norm."
    )


def comparison_figures(comparison: PairedComparison) -> dict[str, Any]:
    """The comparison in `summary.json`."""
    ratio, interval = comparison.speedup
    return {
        "speedup": ratio,
        "speedup_interval": interval,
        "busiest_part": comparison.busiest_part,
        "possible_speedup": comparison.possible_speedup,
        "loss_difference": comparison.loss_difference,
        "norm_difference": comparison.norm_difference,
        **{
            name: {
                "median_s": policy.median_s,
                "step_s": policy.step_s,
                "max_vio": policy.median("moe/max_vio_after"),
                "replicas": policy.total("moe/replicas"),
                "homes_moved": policy.total("moe/homes_moved"),
                **{time: policy.median(time) for time in ("planning_s", "waited_s", "moving_s")},
            }
            for name, policy in comparison.policies.items()
        },
    }
