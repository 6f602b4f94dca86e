"""`python -m experiments.published_layouts`: published throughput of training recipes on H100s, and the simulator's.

Published figures force even routing, so ours are those of even routing too. Equal micro-batches take equal time, so two
short steps give the time of the published one. Published recipes interleave stages (VP), and some compute in FP8; ours
do neither. Nothing is fitted to these figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

import trimtab
from benchmarks.harness import main, show
from experiments.page_tables import markdown_table, replace_tables
from trimtab.cli.options import add_options
from trimtab.cli.parser import Parser
from trimtab.cluster import load_model
from trimtab.report.number_text import bytes_text
from trimtab.trace import synthesize

PAGE = Path(__file__).parents[1] / "docs" / "simulator.md"
EXAMPLES = ("--json docs/benchmarks/published-layouts.json --pages",)
SOURCE = "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md at commit 0a25f911"
SEQUENCE_TOKENS = 4096
# Micro-batches of the two short steps, for each pipeline stage.
SHORT, LONGER = 1, 2
PUBLISHED: tuple[dict[str, Any], ...] = (
    {"model": "qwen3-30b-a3b", "release": "26.02", "precision": "FP8", "gpus": 16, "sequences": 1024, "tp": 1, "pp": 2,
     "vp": 12, "ep": 8, "tokens_per_s": 5113},
    {"model": "qwen3-235b-a22b", "release": "26.02", "precision": "FP8", "gpus": 256, "sequences": 8192, "tp": 2,
     "pp": 8, "vp": 4, "ep": 32, "tokens_per_s": 1633},
    {"model": "gpt-oss-120b", "release": "26.02", "precision": "BF16", "gpus": 64, "sequences": 1280, "tp": 1, "pp": 4,
     "vp": 1, "ep": 8, "tokens_per_s": 5993},
    {"model": "deepseek-v3", "release": "25.09", "precision": "not stated", "gpus": 1024, "sequences": 8192, "tp": 2,
     "pp": 8, "vp": 4, "ep": 64, "tokens_per_s": 1297},
)  # fmt: skip


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--pages", action="store_true", help="put the table into docs/simulator.md")


def run(options: argparse.Namespace) -> None:
    """Run the command with its options."""
    figures = {"source": SOURCE, "recipes": [compare(recipe) for recipe in PUBLISHED]}
    show(figures, print_figures, options.json)
    if options.pages:
        replace_tables(blocks(figures), PAGE)


def compare(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with the simulated tokens a second and GPU, and memory of the rank that needs most."""
    data_ranks = recipe["gpus"] // (recipe["tp"] * recipe["pp"])
    micro_batches = recipe["sequences"] // data_ranks
    sizes = [recipe["pp"] * times for times in (SHORT, LONGER)]
    (short_s, _), (longer_s, peak_bytes) = (_step(recipe, data_ranks, size) for size in sizes)
    step_s = longer_s + (micro_batches - sizes[1]) * (longer_s - short_s) / (sizes[1] - sizes[0])
    tokens_per_s = recipe["sequences"] * SEQUENCE_TOKENS / step_s / recipe["gpus"]
    return {
        **recipe,
        "simulated_tokens_per_s": tokens_per_s,
        "ratio": tokens_per_s / recipe["tokens_per_s"],
        "peak_bytes": peak_bytes,
    }


def _step(recipe: Mapping[str, Any], data_ranks: int, micro_batches: int) -> tuple[float, int]:
    """Seconds and bytes of a step of so many micro-batches of one sequence."""
    model = load_model(recipe["model"])
    trace = synthesize(
        num_sequences=data_ranks * micro_batches, sequence_length=SEQUENCE_TOKENS, num_layers=1,
        num_experts=model.num_experts, top_k=model.top_k, zipf=0.0,
    )  # fmt: skip
    result = trimtab.simulate(
        trace,
        trimtab.Run(
            model=model,
            ranks=recipe["ep"],
            groups=recipe["gpus"] // (recipe["ep"] * recipe["pp"]),
            tp=recipe["tp"],
            pp=recipe["pp"],
            token_budget=SEQUENCE_TOKENS // recipe["tp"],
            recompute=False,
            slots=0,
            sampled=1.0,
            recompute_granularity="none",
        ),
        policies="static",
    )
    static = result.outcomes["static"]
    return static.simulated.step_time_s, static.peak_bytes


def blocks(figures: Mapping[str, Any]) -> dict[str, str]:
    """The generated part of docs/simulator.md, by name."""
    rows = [
        [
            each["model"], each["release"],
            f"{each['gpus']} GPUs, TP {each['tp']}, PP {each['pp']} (VP {each['vp']}), EP {each['ep']}",
            each["precision"],
            f"{each['tokens_per_s']:,}", f"{each['simulated_tokens_per_s']:,.0f}", f"{each['ratio']:.2f}",
            bytes_text(each["peak_bytes"]),
        ]
        for each in figures["recipes"]
    ]  # fmt: skip
    header = ["model", "release", "layout", "precision", "published", "simulated", "ratio", "memory, simulated"]
    return {"published-layouts": markdown_table(header, rows)}


def print_figures(figures: Mapping[str, Any], console: Console) -> None:
    """Print the table as it stands on the page."""
    console.print(*blocks(figures).values(), sep="\n\n", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main("experiments.published_layouts")
