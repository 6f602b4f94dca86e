"""Figures of a disaggregated rollout with 1, 2 and 3 micro-batches, and with copies: tables, picture, prediction.

`python -m recipes.disaggregated_rollout.benchmark` measures them. The prediction for m micro-batches is the sum over
all calls of layers of max(m * max(T_a, T_e), T_a + T_e + 2 * T_c), with the call's own T_a and T_e, since calls of
prefill and those after the output head take longer, and the mean T_c of a message in one direction.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.harness import Figures
from benchmarks.tables import Columns, figure_table, named_rows, picture, quantity
from trimtab.array_type import Array
from trimtab.report.number_text import seconds

MICRO_BATCHES = (1, 2, 3)
# Calls of the picture, in the middle of decoding.
SHOWN_CALLS = 4
NOTES = (
    "On equal CPU ranks, colocated data parallel ranks take (T_a + T_e) / 2 for what a disaggregated pair takes "
    "max(T_a, T_e) for, so they can't be beaten. A gain exists where larger expert batches are cheaper per token, as "
    "with weights that are read once for all attention ranks, or where ranks of another kind suit one side."
)
PIPELINE: Columns = {
    "micro-batches": "{name}",
    "tokens/s": "{tokens_per_s:.0f}",
    "of one": "{speedup:.2f}",
    "predicted": "{predicted_tokens_per_s:.0f}",
    "error": "{error:+.0%}",
    "T_a": quantity("attention_s", seconds),
    "T_e": quantity("expert_s", seconds),
    "T_c": quantity("message_s", seconds),
}
COPIES: Columns = {
    "experts": "{name}",
    "tokens/s": "{tokens_per_s:.0f}",
    "busiest / mean": "{max_over_mean:.2f}",
}


@dataclass(frozen=True)
class Run:
    """One rollout. Spans of compute are `(micro-batch, start, end)`, on the ranks 0 and 1."""

    seconds: float
    attention: list[tuple[int, float, float]]
    experts: list[tuple[int, float, float]]

    @property
    def times_2C(self) -> Array:
        """T_a and T_e of each call of a layer, if nothing overlaps."""
        calls = len(self.experts)
        return np.array([[end - start for _, start, end in spans[:calls]] for spans in (self.attention, self.experts)])

    @property
    def message_s(self) -> float:
        """T_c, mean of the calls, if nothing overlaps."""
        return (self.seconds - float(self.times_2C.sum())) / (2 * len(self.experts))


def summarise(results: Mapping[tuple[str, int], list[Run]], tokens: int) -> Figures:
    """Figures of each number of micro-batches: medians over the rounds; `tokens` are those of a rollout."""
    figures = {}
    first = statistics.median(run.seconds for run in results["pipeline", 1])
    for m in MICRO_BATCHES:
        taken = statistics.median(run.seconds for run in results["pipeline", m])
        parts = results["part", m]
        attention_C, expert_C = np.median([run.times_2C for run in parts], axis=0)
        message_s = statistics.median(run.message_s for run in parts)
        alone_C = attention_C + expert_C + 2 * message_s
        predicted_s = float(np.maximum(m * np.maximum(attention_C, expert_C), alone_C).sum())
        figures[str(m)] = {
            "seconds": [run.seconds for run in results["pipeline", m]],
            "tokens_per_s": tokens / taken,
            "speedup": first / taken,
            "attention_s": float(attention_C.mean()),
            "expert_s": float(expert_C.mean()),
            "message_s": message_s,
            "predicted_tokens_per_s": tokens / predicted_s,
            "error": taken / predicted_s - 1,
        }
    return figures


def draw(path: Path, runs: Mapping[int, Run], layers: int) -> None:
    """Draw a few calls of the pipeline with each number of micro-batches."""
    with picture(path, len(runs), 1, (9, 1.6), sharex=True) as axes:
        for axis, (m, run) in zip(axes[:, 0], runs.items(), strict=True):
            middle = len(run.experts) // 2 // (m * layers) * m * layers
            begin = run.experts[middle][1]
            end = run.experts[min(middle + m * SHOWN_CALLS, len(run.experts) - 1)][1]
            for row, spans in enumerate((run.experts, run.attention)):
                for micro_batch, start, stop in spans:
                    if start < end and stop > begin:
                        bar = 1e3 * (start - begin), 1e3 * (stop - start)
                        axis.broken_barh([bar], (row - 0.4, 0.8), color=f"C{micro_batch}")
            axis.set_yticks([0, 1], ["experts", "attention"])
            axis.set_title(f"{m} micro-batch{'es' * (m > 1)}", loc="left", fontsize=10)
            axis.set_xlim(left=0)
        axes[-1, 0].set_xlabel("milliseconds; one colour per micro-batch")


def print_figures(figures: Figures, console: Console) -> None:
    """Print both tables."""
    sizes = figures["settings"]
    title = f"1 + 1 ranks, {sizes['sequences']} sequences, experts of width {figures['width']}"
    console.print(figure_table(title, PIPELINE, named_rows(figures["micro_batches"])))
    console.print(figure_table("1 + 2 ranks, skewed routing", COPIES, named_rows(figures["copies"])))
    console.print(
        f"Colocated, 2 ranks with half of the sequences each: {figures['colocated']['tokens_per_s']:.0f} tokens/s."
    )
    console.print(NOTES)
