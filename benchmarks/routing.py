"""Synthetic routing of a rollout of Qwen3-30B-A3B with long responses, and its sizes in figures."""

from __future__ import annotations

from typing import Any

from trimtab.cores import usable_cores
from trimtab.trace import PRESETS, RoutingTrace, synthesize_preset

PRESET, LAYERS, EXPERTS, TOP_K = "qwen3-30b-mixed", 48, 128, 8
MEAN_LENGTH, LONGEST = 1024, 4096


def long_responses(tokens: int, *, layers: int = LAYERS, steps: int = 1, seed: int = 0) -> RoutingTrace:
    """Synthetic routing of about `tokens` tokens."""
    return synthesize_preset(
        PRESETS[PRESET], num_sequences=max(1, tokens // (MEAN_LENGTH * steps)), mean_length=MEAN_LENGTH,
        max_length=LONGEST, num_layers=layers, num_experts=EXPERTS, top_k=TOP_K, num_steps=steps, seed=seed,
    )  # fmt: skip


def sizes_of(trace: RoutingTrace) -> dict[str, Any]:
    """Figures of a trace of `long_responses`, and the cores of this machine."""
    return {
        "tokens": trace.num_tokens, "layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K, "preset": PRESET,
        "cores": usable_cores(),
    }  # fmt: skip


def sizes_text(figures: dict[str, Any]) -> str:
    """The figures of `sizes_of` as the title of a table."""
    sizes = f"{figures['tokens'] / 1e6:.2f} M tokens x {figures['layers']} layers"
    return f"{sizes}, top-{figures['top_k']} of {figures['experts']}, on {figures['cores']} cores"
