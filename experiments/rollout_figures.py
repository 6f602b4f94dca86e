"""`python -m experiments.rollout_figures`: placements judged on later steps, and sizings, of docs/rollout.md.

Placements are made from one step of each preset of synthetic routing and kept for the next four. Sizings are two worked
ones, gains by context, and published throughput of engines beside what the sizing predicts.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

import trimtab
from benchmarks.harness import main, show
from experiments.page_tables import markdown_table, replace_tables
from trimtab.api.size_rollout import RolloutSizing
from trimtab.cli.options import add_options
from trimtab.cli.parser import Parser
from trimtab.cluster import ModelSpec
from trimtab.figures import plural
from trimtab.planner.rollout_placement import LATER_STEPS, count_steps, judge_placements
from trimtab.report.number_text import bytes_text, seconds
from trimtab.trace import PRESETS, synthesize_preset
from trimtab.trace.store import MemoryReader

PAGE = Path(__file__).parents[1] / "docs" / "rollout.md"
EXAMPLES = ("--json docs/benchmarks/rollout.json --pages",)
RANKS = 8
TRACE: dict[str, Any] = {"num_sequences": 256, "mean_length": 512, "max_length": 1024, "num_layers": 4}
DEEPSEEK, QWEN = (256, 8), (128, 8)
TWO_KINDS: dict[str, Any] = {
    "cluster": "h20x8", "expert_cluster": "h100x8", "gpu_hour": 1.2, "expert_gpu_hour": 2.5,
}  # fmt: skip
# Experts and top-k of the routing, and arguments of `size_rollout`.
SETTINGS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "one-kind": (
        DEEPSEEK, {"model": "deepseek-v3", "cluster": "h200x8", "gpus": 128, "context": 8000, "gpu_hour": 3.5},
    ),
    "two-kinds": (QWEN, {"model": "qwen3-235b-a22b", "gpus": 64, "context": 1000} | TWO_KINDS),
}  # fmt: skip
CONTEXTS = (1000, 4000, 16_000, 64_000)
GAINS: tuple[tuple[tuple[int, int], dict[str, Any]], ...] = (
    (QWEN, {"model": "qwen3-30b-a3b", "cluster": "h100x8", "gpus": 32}),
    (DEEPSEEK, {"model": "deepseek-v3", "cluster": "h100x8", "gpus": 128}),
    (QWEN, {"model": "qwen3-30b-a3b", "gpus": 32} | TWO_KINDS),
    (QWEN, {"model": "qwen3-235b-a22b", "gpus": 64} | TWO_KINDS),
    (DEEPSEEK, {"model": "deepseek-v3", "gpus": 128} | TWO_KINDS),
)
# Published decode of DeepSeek-V3 with weights in one byte: source, tokens a second and GPU, and arguments.
PUBLISHED: dict[str, tuple[str, float, dict[str, Any]]] = {
    "DeepSeek, 144 H800": (
        "https://github.com/deepseek-ai/open-infra-index", 14_800 / 8,
        {"cluster": "h800x8", "gpus": 144, "context": 4989, "token_ms": 50},
    ),
    "SGLang, 72 H100": (
        "https://lmsys.org/blog/2025-05-05-large-scale-ep/", 22_300 / 8,
        {"cluster": "h100x8", "gpus": 72, "context": 2050, "token_ms": 110},
    ),
    "SGLang, 16 H20": (
        "https://lmsys.org/blog/2025-09-26-sglang-ant-group", 5_700 / 8,
        {"cluster": "h20x8", "gpus": 16, "context": 4850, "token_ms": 100},
    ),
}  # fmt: skip

# Settings that are fields of the run.
OF_RUN = ("cluster", "model", "slots")


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--pages", action="store_true", help="put the figures into docs/rollout.md")


def run(options: argparse.Namespace) -> None:
    """Run the command with its options."""
    figures = {
        "trace": TRACE,
        "ranks": RANKS,
        "placements": [placement(name, redundant) for name in PRESETS for redundant in (0, 2 * RANKS)],
        "sizings": {name: sized(*setting).figures() for name, setting in SETTINGS.items()},
        "gains": [gain(*setting, context) for setting in GAINS for context in CONTEXTS],
        "published": [published(name) for name in PUBLISHED],
    }
    show(figures, print_figures, options.json)
    if options.pages:
        replace_tables(blocks(figures), PAGE)


def placement(name: str, redundant: int) -> dict[str, Any]:
    """Max/mean of rank loads by steps since the placement's own, and in the engine's order."""
    trace = synthesize_preset(PRESETS[name], **TRACE, num_steps=LATER_STEPS + 1, seed=0)
    judged = judge_placements(count_steps(MemoryReader(trace)), trace.num_experts + redundant, RANKS, RANKS)
    return {"preset": name, "redundant": redundant} | judged._asdict()


def sized(routing: tuple[int, int], setting: Mapping[str, Any]) -> RolloutSizing:
    """Sizing of the last of two steps of synthetic routing with experts and top-k of a model."""
    experts, top_k = routing
    preset = PRESETS["qwen3-30b-mixed"]
    trace = synthesize_preset(preset, **TRACE, num_experts=experts, top_k=top_k, num_steps=2, seed=0)
    run = {name: value for name, value in setting.items() if name in OF_RUN}
    own = {name: value for name, value in setting.items() if name not in OF_RUN}
    return trimtab.size_rollout(trace, trimtab.Run(**run), **own)


def gain(routing: tuple[int, int], setting: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Throughput of the best separate ranks over that of the best colocated ones; None if one of them doesn't fit."""
    result = sized(routing, {**setting, "context": context})
    colocated, separate = result.best(colocated=True), result.best(colocated=False)
    ratio = separate.worth / colocated.worth if colocated and separate else None
    return {
        "setting": {**setting, "context": context},
        "gain": ratio,
        "attention_idle": separate and separate.attention_idle,
        "expert_idle": separate and separate.expert_idle,
    }


def published(name: str) -> dict[str, Any]:
    """Published tokens a second and GPU, and those of the best colocated deployment."""
    source, tokens, setting = PUBLISHED[name]
    model = replace(ModelSpec.named("deepseek-v3"), weight_bytes=1)
    best = sized(DEEPSEEK, {"model": model, **setting}).best(colocated=True)
    assert best is not None
    found = {"tokens_per_s_per_gpu": best.tokens_per_s_per_gpu, "token_s": best.token_s, "gpus": best.gpus}
    return {"name": name, "source": source, "published": tokens, "batch": best.batch} | found | {"setting": setting}


def blocks(figures: Mapping[str, Any]) -> dict[str, str]:
    """The generated parts of docs/rollout.md, by name."""
    sizings = {name: _sizing(found) for name, found in figures["sizings"].items()}
    return sizings | {
        "placements": _placements(figures), "gains": _gains(figures["gains"]),
        "published": _published(figures["published"]),
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


def _gains(found: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for start in range(0, len(found), len(CONTEXTS)):
        setting = found[start]["setting"]
        kinds = " + ".join(setting[key] for key in ("cluster", "expert_cluster") if key in setting)
        cells = [
            f"{each['gain']:.2f} ({each['attention_idle']:.0%} / {each['expert_idle']:.0%})" if each["gain"] else "–"
            for each in found[start : start + len(CONTEXTS)]
        ]
        rows.append([f"`{setting['model']}`, {kinds}", str(setting["gpus"]), *cells])
    return markdown_table(["model, GPUs", "most", *(f"{context:,} tokens" for context in CONTEXTS)], rows)


def _published(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            f"[{each['name']}]({each['source']})", f"{each['setting']['context']:,}",
            f"{each['setting']['token_ms']} ms", f"{each['published']:,.0f}", f"{each['tokens_per_s_per_gpu']:,.0f}",
            f"{each['tokens_per_s_per_gpu'] / each['published'] - 1:+.0%}", str(each["gpus"]), str(each["batch"]),
            seconds(each["token_s"]),
        ]
        for each in found
    ]  # fmt: skip
    header = ["decode", "context", "limit", "published", "predicted", "error", "GPUs", "batch a rank", "token"]
    return markdown_table(header, rows)


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
    main("experiments.rollout_figures")
