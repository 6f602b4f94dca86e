"""`python -m experiments.advice_stories`: the three stories of docs/advise.md, as JSON and on the page.

Each makes a synthetic dump of a part of three steps, and asks `trimtab advise` about a cluster. The page has the
commands.
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
from trimtab.report.number_text import bytes_text, seconds
from trimtab.trace import PRESETS, synthesize_preset

PAGE = Path(__file__).parents[1] / "docs" / "advise.md"
# Strategies of the tables, beside `eplb` and `nothing`.
FASTEST = 4
EXAMPLES = ("--json docs/benchmarks/advice-stories.json --pages",)
TRACE: dict[str, Any] = {"num_sequences": 192, "mean_length": 2048, "max_length": 8192, "num_layers": 4, "num_steps": 3}
STORIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen-thirty": (
        "qwen3-30b-math",
        {},
        {"model": "qwen3-30b-a3b", "ranks": 16, "step_tokens": 4_000_000, "checkpointing": True, "gpu_hour": 2.5},
    ),
    "qwen-large": (
        "qwen3-30b-mixed",
        {},
        {
            "model": "qwen3-235b-a22b", "ranks": 16, "tp": 2, "pp": 8, "step_tokens": 20_000_000, "checkpointing": True,
            "gpu_hour": 2.5,
        },
    ),
    "gpt-oss": (
        "gpt-oss-20b-reasoning",
        {"num_experts": 128, "top_k": 4},
        {
            "model": "gpt-oss-120b", "ranks": 8, "groups": 2, "pp": 4, "step_tokens": 2_000_000, "checkpointing": True,
            "gpu_hour": 2.5,
        },
    ),
}  # fmt: skip


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--pages", action="store_true", help="put the figures into docs/advise.md")


def run(options: argparse.Namespace) -> None:
    """Run the command with its options."""
    figures = {"trace": TRACE, "stories": {name: story(name) for name in STORIES}}
    show(figures, print_figures, options.json)
    if options.pages:
        replace_tables(blocks(figures), PAGE)


def story(name: str) -> dict[str, Any]:
    """What `trimtab advise --json` writes, of one story."""
    preset, of_model, setting = STORIES[name]
    trace = synthesize_preset(PRESETS[preset], **TRACE | of_model)
    return trimtab.advise(trace, trimtab.Run(**setting)).figures()


def blocks(figures: Mapping[str, Any]) -> dict[str, str]:
    """The generated parts of docs/advise.md, by name."""
    return {name: _block(found) for name, found in figures["stories"].items()}


def print_figures(figures: Mapping[str, Any], console: Console) -> None:
    """Print the parts as they stand on the page."""
    console.print(*blocks(figures).values(), sep="\n\n", markup=False, soft_wrap=True)


def _block(found: Mapping[str, Any]) -> str:
    rows = [
        [
            f"`{name}`", seconds(each["step_s"]["value"]),
            f"{seconds(each['step_s']['low'])} to {seconds(each['step_s']['high'])}",
            f"{each['speedup']['value']:.2f}x",
            f"{each['over_eplb']['value']:.2f}x", f"{each['of_even']:.0%}",
            f"{bytes_text(each['peak_bytes'])}{'' if each['fits'] else ', does not fit'}",
        ]
        for place, (name, each) in enumerate(found["strategies"].items())
        if place < FASTEST or name in ("eplb", "nothing")
    ]  # fmt: skip
    at = found["break_even_max_over_mean"]
    even = "" if at is None else f" Break-even: a max/mean of rank loads of {at:.2f}; here it is"
    even += "" if at is None else f" {found['max_over_mean']:.2f}."
    header = ["strategy", "step", "interval", "speed-up", "over `eplb`", "of even", "memory"]
    return f"> {found['recommendation']}{even}\n\n{markdown_table(header, rows)}"


if __name__ == "__main__":
    main("experiments.advice_stories")
