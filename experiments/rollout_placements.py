"""`python -m experiments.rollout_placements`: rollout placements judged on later steps, and the sizings of the guide.

Placements are made from one step of each preset of synthetic routing and kept for the next four. Sizings are those of
docs/rollout.md.
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
from trimtab.planner.rollout_placement import LATER_STEPS, count_steps, judge_placements
from trimtab.report.number_text import bytes_text, plural, seconds
from trimtab.trace import PRESETS, synthesize_preset
from trimtab.trace.store import MemoryReader

PAGE = Path(__file__).parents[1] / "docs" / "rollout.md"
EXAMPLES = ("--json docs/benchmarks/rollout.json --pages",)
RANKS = 8
TRACE: dict[str, Any] = {"num_sequences": 256, "mean_length": 512, "max_length": 1024, "num_layers": 4}
# Preset, experts and top-k of the routing, and arguments of `size_rollout`.
SETTINGS: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {
    "one-kind": (
        "qwen3-30b-mixed",
        (256, 8),
        {"model": "deepseek-v3", "cluster": "h200x8", "gpus": 128, "context": 8000, "gpu_hour": 3.5},
    ),
    "two-kinds": (
        "gpt-oss-20b-reasoning",
        (128, 4),
        {
            "model": "gpt-oss-120b", "cluster": "h20x8", "expert_cluster": "h100x8", "gpus": 64, "context": 4000,
            "gpu_hour": 1.2, "expert_gpu_hour": 2.5,
        },
    ),
}  # fmt: skip


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--pages", action="store_true", help="put the figures into docs/rollout.md")


def run(options: argparse.Namespace) -> None:
    """Run the command with its options."""
    figures = {
        "trace": TRACE,
        "ranks": RANKS,
        "placements": [placement(name, redundant) for name in PRESETS for redundant in (0, 2 * RANKS)],
        "sizings": {name: sizing(name) for name in SETTINGS},
    }
    show(figures, print_figures, options.json)
    if options.pages:
        replace_tables(blocks(figures), PAGE)


def placement(name: str, redundant: int) -> dict[str, Any]:
    """Max/mean of rank loads by steps since the placement's own, and in the engine's order."""
    trace = synthesize_preset(PRESETS[name], **TRACE, num_steps=LATER_STEPS + 1, seed=0)
    judged = judge_placements(count_steps(MemoryReader(trace)), trace.num_experts + redundant, RANKS, RANKS)
    return {"preset": name, "redundant": redundant} | judged._asdict()


def sizing(name: str) -> dict[str, Any]:
    """What `trimtab rollout --json` writes of one setting."""
    preset, (num_experts, top_k), setting = SETTINGS[name]
    trace = synthesize_preset(PRESETS[preset], **TRACE, num_experts=num_experts, top_k=top_k, num_steps=2, seed=0)
    return trimtab.size_rollout(trace, **setting).figures()


def blocks(figures: Mapping[str, Any]) -> dict[str, str]:
    """The generated parts of docs/rollout.md, by name."""
    return {"placements": _placements(figures)} | {
        name: _sizing(found) for name, found in figures["sizings"].items()
    }  # fmt: skip


def print_figures(figures: Mapping[str, Any], console: Console) -> None:
    """Print the parts as they stand on the page."""
    console.print(*blocks(figures).values(), sep="\n\n", markup=False, soft_wrap=True)


def _placements(figures: Mapping[str, Any]) -> str:
    rows = [
        [
            f"`{each['preset']}`", str(each["redundant"]), f"{each['usual']:.2f}",
            *(f"{value:.2f}" for value in each["by_age"]),
            "–" if each["refresh_after"] is None else plural(each["refresh_after"], "step"),
        ]
        for each in figures["placements"]
    ]  # fmt: skip
    later = [plural(age, "step") + " later" for age in range(1, LATER_STEPS + 1)]
    return markdown_table(["preset", "redundant", "engine's order", "own step", *later, "refresh pays after"], rows)


def _sizing(found: Mapping[str, Any]) -> str:
    rows = [
        [
            ("colocated" if each["colocated"] else "separate") + (", copies" if each["copies"] else ""),
            f"{each['attention_ranks']}" + ("" if each["colocated"] else f" + {each['expert_ranks']}"),
            str(each["tp"]), str(each["micro_batches"]), str(each["batch"]),
            f"{each['tokens_per_s_per_gpu']:,.0f}", f"{each['tokens_per_money'] / 1e6:.2f} M",
            seconds(each["token_s"]), *(seconds(each[key]) for key in ("attention_s", "expert_s", "exchange_s")),
            "–" if each["colocated"] else f"{each['least_micro_batches']:.2f}",
            f"{each['attention_idle']:.0%} / {each['expert_idle']:.0%}", bytes_text(each["attention_bytes"]),
            bytes_text(each["expert_bytes"]),
        ]
        for each in found["deployments"]
    ]  # fmt: skip
    header = [
        "ranks", "GPUs", "TP", "m", "batch a rank", "tokens/s/GPU", "tokens per money", "time per token", "T_a", "T_e",
        "T_c", "m needed", "waits", "attention rank", "expert rank",
    ]  # fmt: skip
    return f"> {found['answer']}\n\n{markdown_table(header, rows)}"


if __name__ == "__main__":
    main("experiments.rollout_placements")
