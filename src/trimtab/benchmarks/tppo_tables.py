"""The tables that `trimtab bench t-ppo` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from trimtab.benchmarks.figure_table import Columns, figure_table, named_rows, quantity
from trimtab.report.number_text import seconds

RUNS: Columns = {
    "algorithm": "{name}",
    "decode steps / 1000 trained": "{decode_steps_per_1000_trained:.1f}",
    "occupancy": "{occupancy:.0%}",
    "sampled / trained": "{sampled_per_trained:.2f}",
    "prefix / trained": "{prefix_per_trained:.2f}",
    "computed / trained": "{computed_per_trained:.2f}",
    "time": quantity("wall_s", seconds),
    "accuracy before": "{accuracy_before:.1%}",
    "after": "{accuracy:.1%}",
}
AGAINST: Columns = {
    "T-PPO against": "{name}",
    "decode steps": "{decode_steps_ratio:.2f}×",
    "95% interval": lambda row: "{:.2f} to {:.2f}".format(*row["decode_steps_ratio_interval"]),
    "accuracy": "{accuracy_difference:+.1%}",
    "95% interval ": lambda row: "{:+.1%} to {:+.1%}".format(*row["accuracy_difference_interval"]),
    "to equal accuracy": "{equal_accuracy_ratio:.2f}×",
    "95% interval  ": lambda row: "{:.2f} to {:.2f}".format(*row["equal_accuracy_ratio_interval"]),
}
NOTES = (
    "Decode step: samples a token of every response that has not ended. Occupancy: sampled tokens / (places x decode "
    "steps). Prefix: tokens of prompts and earlier windows, fed in the first decode step. Trained: tokens of the "
    "policy's loss; GRPO samples groups whose responses are all right or all wrong, but does not train them. T-PPO "
    "against another: the other's decode steps per trained token, divided by T-PPO's; to equal accuracy, decode steps "
    "in which the other first reaches the lower of both last accuracies, divided by T-PPO's. Time is without "
    "evaluations. On a CPU a decode step takes longer with more responses; on a GPU much less so."
)


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """Print the algorithms, T-PPO against the others, and what prefix routing does."""
    settings, summary = figures["settings"], figures["summary"]
    title = (
        f"{settings['trained_tokens']:,} trained tokens, {settings['places']} places, responses up to "
        f"{settings['max_new_tokens']}, window {settings['window']}: means of {settings['seeds']} seeds"
    )
    console.print(figure_table(title, RUNS, named_rows(summary["algorithms"])))
    console.print(figure_table("Medians over seeds", AGAINST, named_rows(summary["against"])))
    for kind, difference in summary["rollout_logprob_diff"].items():
        console.print(f"prefixes {kind}: log-probabilities of new tokens differ from the rollout's by {difference:.4f}")
    console.print(NOTES)
