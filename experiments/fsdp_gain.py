"""`python -m experiments.fsdp_gain`: an FSDP2 run with expert parallelism, balanced: simulated gain, computed memory.

The dispatch sends every row, as transformers' all-to-all does. The simulated step is that of Megatron's layout with as
many ranks: what FSDP2 gathers is not in it.
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
from experiments.simulated import SIZE, STEP, TRACES
from trimtab.cli.options import add_options
from trimtab.cli.parser import Parser
from trimtab.cluster import ModelSpec
from trimtab.cluster.specs import RING_LAYERS
from trimtab.trace import PRESETS, synthesize_preset

EXAMPLES = ("--json out/fsdp.json",)
PAGE = Path(__file__).parents[1] / "docs" / "trl.md"
MODEL, RANKS = "qwen3-30b-a3b", (8, 16, 32)
KINDS = {"qwen3-30b-math": "skewed", "nemotron-3-nano-text": "mild"}
POLICIES = ("static", "eplb", "trimtab")
# Bytes of a parameter: float32 weights, gradients and two moments of Adam; copies that are sent are bfloat16.
WHOLE, CAST = 4, 2


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--pages", action="store_true", help="put the tables into docs/trl.md")


def run(options: argparse.Namespace) -> None:
    """Run the command with its options."""
    kept = ("step_time_s", "speedup_vs_static", "slots_per_rank")
    gain = []
    for name in KINDS:
        trace = synthesize_preset(PRESETS[name], num_experts=128, top_k=8, num_steps=TRACES[name], **SIZE)
        runs = trimtab.Run(model=MODEL, dispatcher="rows", **STEP).sweep(ranks=RANKS)
        for case in trimtab.simulate(trace, runs, policies=POLICIES).figures()["sweep"]:
            policies = {policy: {key: case["policies"][policy][key] for key in kept} for policy in POLICIES}
            gain.append({"trace": name, "ranks": case["ranks"]} | policies)
    figures = {
        "model": MODEL,
        "gain": gain,
        "bytes": {str(ranks): memory_by_part(ModelSpec.named(MODEL), ranks) for ranks in RANKS},
    }
    show(figures, print_figures, options.json)
    if options.pages:
        replace_tables(blocks(figures), PAGE)


def memory_by_part(model: ModelSpec, ranks: int) -> dict[str, float]:
    """Bytes of a rank by part, with `ep_size` = `fsdp_size` = ranks and FSDP2's mixed precision."""
    experts = model.moe_layers * model.num_experts * model.expert_parameters
    return {
        "weights": WHOLE * model.parameters / ranks,
        "gradients": WHOLE * model.parameters / ranks,
        "Adam": 2 * WHOLE * model.parameters / ranks,
        "copies of experts": CAST * experts / ranks,
        "one slot": RING_LAYERS * model.expert_bytes,
    }


def print_figures(figures: Mapping[str, Any], console: Console) -> None:
    """Print the tables as they stand on the page."""
    console.print(*blocks(figures).values(), sep="\n\n", markup=False, soft_wrap=True)


def blocks(figures: Mapping[str, Any]) -> dict[str, str]:
    """The generated parts of the page, by name."""
    gain = [
        [f"{case['ranks']} GPUs, {KINDS[case['trace']]}"]
        + [f"{case[name]['step_time_s']:.1f} s" for name in POLICIES]
        + [f"{case[name]['speedup_vs_static']:.2f}x" for name in POLICIES[1:]]
        for case in figures["gain"]
    ]
    header = ["EP over", *(f"`{name}`" for name in POLICIES), *(f"`{name}` over `static`" for name in POLICIES[1:])]
    parts = figures["bytes"]
    memory = [
        [part, *(f"{parts[ranks][part] / 1e9:.{2 if part == 'one slot' else 1}f} GB" for ranks in parts)]
        for part in next(iter(parts.values()))
    ]
    whole = [sum(of.values()) - of["one slot"] for of in parts.values()]
    memory.append(["all but slots", *(f"{each / 1e9:.1f} GB" for each in whole)])
    return {
        "gain": markdown_table(header, gain),
        "memory": markdown_table(["a rank of", *(f"{ranks} GPUs" for ranks in parts)], memory),
    }


if __name__ == "__main__":
    main("experiments.fsdp_gain")
