"""The tables that `trimtab bench live` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from trimtab.benchmarks.figure_table import Columns, figure_table, named_rows, quantity
from trimtab.benchmarks.live_stragglers import PUBLISHED
from trimtab.report.number_text import bytes_text, seconds

STRAGGLERS: Columns = {
    "ranks": "{ranks}",
    "balancer": "{policy}",
    "tokens before": "{token_straggler_before:.1%}",
    "after": "{token_straggler:.1%}",
    "cut": "{token_straggler_cut:.0%}",
    "of all cases": lambda row: "{:.0%} to {:.0%}".format(*row["token_straggler_cut_range"]),
    "GEMM before": "{gemm_straggler_before:.1%}",
    "after ": "{gemm_straggler:.1%}",
    "cut ": "{gemm_straggler_cut:.0%}",
    "of all cases ": lambda row: "{:.0%} to {:.0%}".format(*row["gemm_straggler_cut_range"]),
}
TRAFFIC: Columns = {
    "ranks": "{ranks}",
    "balancer": "{policy}",
    "replicas": "{replicas:.1f}",
    "weights": quantity("weight_bytes", bytes_text),
    "rows": lambda row: f"{row['row_bytes'] / 1e6:+.0f} MB",
}
PREDICTORS: Columns = {
    "ranks": "{ranks}",
    "predictor": "{predictor}",
    "hit rate": "{hit_rate:.0%}",
    "used": "{used:.0%}",
    "tokens cut": "{token_straggler_cut:.0%}",
}
STEPS: Columns = {"variant": "{name}", "median step": quantity("median_s", seconds)}
POLICIES: Columns = {
    "policy": "{name}",
    "gain captured": "{gain_captured:.2f}",
    "95% interval": lambda row: "{:.2f} to {:.2f}".format(*row["gain_captured_interval"]),
    "overhead, even": lambda row: "" if row["overhead_when_even"] is None else f"{row['overhead_when_even']:+.1%}",
    "95% interval ": lambda row: (
        "" if row["overhead_when_even"] is None else "{:+.1%} to {:+.1%}".format(*row["overhead_when_even_interval"])
    ),
}
COUNTED: Columns = {
    "policy": "{name}",
    "operations": "{operations:.0f}",
    "exchanges": "{exchanges:.1f}",
    "weights": quantity("weight_bytes", bytes_text),
    "gradients": quantity("gradient_bytes", bytes_text),
}
KNOWN = (
    "fastermoe (our reimplementation, without a limit of memory), feplb and quota choose from the counts of the layer; "
    "predict chooses replicas from the micro-step before and splits by the counts of the layer; foresight plans the "
    "whole step from recorded routing. Straggler: the busiest rank above the mean of ranks, as a part of the mean."
)
NOTES = (
    "gain_captured: the time that a policy saves on skewed routing, divided by the time that the skew costs. "
    "overhead_when_even: its step time on even routing divided by that without balancing, minus 1. Time on a GPU is "
    "not measured. On a CPU copies of weights and rows compete with the products for cores; a copy engine does not."
)


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """Print stragglers with what they cost, where they differ from FEPLB's, step times, and what they mean."""
    console.print(figure_table("Stragglers: medians over presets and seeds", STRAGGLERS, figures["summary"]))
    console.print(KNOWN)
    for line in differences(figures["summary"]):
        console.print(line)
    title = "In addition to a forward without balancing: of an instance, all ranks, Qwen3-30B-A3B in bf16"
    console.print(figure_table(title, TRAFFIC, figures["summary"]))
    title = "Predictors: predicted replicas that the counts would also choose, and that get rows"
    console.print(figure_table(title, PREDICTORS, figures["predictors"]))
    title = f"Step time on {figures['step_ranks']} CPU ranks, {figures['settings']['pairs']} rounds"
    console.print(figure_table(title, STEPS, named_rows(figures["variants"])))
    console.print(figure_table("Live policies compared with live routing", POLICIES, named_rows(figures["policies"])))
    title = "Of a layer, forward and backward, on rank 0 and the routing of seed 0"
    console.print(figure_table(title, COUNTED, named_rows(figures["counted"])))
    console.print(NOTES)


def differences(summary: list[dict[str, Any]]) -> list[str]:
    """Where the figures of `feplb` are not the published ones, and why."""
    lines = []
    by_key = {(row["ranks"], row["policy"]): row for row in summary}
    for (ranks, policy), row in by_key.items():
        if policy != "feplb":
            continue
        for name, (low, high) in PUBLISHED.items():
            value, kind = row[name], name.split("_")[0]
            if not low <= value <= high:
                side = "more" if value > high else "less"
                lines.append(
                    f"feplb at EP {ranks}: {kind} straggler cut by {value:.0%}, {side} than the published "
                    f"{low:.0%} to {high:.0%}"
                )
        if ranks == 8 and (8, "fastermoe") in by_key:
            ratio = row["token_straggler"] / by_key[8, "fastermoe"]["token_straggler"]
            lines.append(f"feplb at EP 8: {ratio:.2f} of the token straggler of fastermoe; published: 0.5")
    if lines:
        lines.append(REASONS)
    return lines


REASONS = (
    "Reasons: the published figures are of the authors' own training routing, whose skew, rows of a micro-step and "
    "fewest rows of a move are not published. Here routing is synthetic, and dynamic experts are the hottest of the "
    "micro-step before, which stay hot; with fixed ones (feplb, fixed) cuts are smaller. GEMM stragglers include the "
    "time of smaller and additional products, and noise of some percent, which limits cuts where ranks differ little."
)
