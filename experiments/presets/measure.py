"""Measure presets next to published skew, and how assumptions without a source change the headline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from rich.progress import track

import trimtab
from experiments.presets.published_skew import PUBLISHED, PublishedSkew
from experiments.presets.skew_measures import MEASURES, Sample
from trimtab.api.simulate import SimulationResult
from trimtab.array_type import Array
from trimtab.simulator.comparison import permuted_steps
from trimtab.trace import PRESETS, SkewPreset, synthesize_preset

SCHEMA = "trimtab-presets-1"
STEPS, MEAN_LENGTH = 2, 512
# Tokens of a step: four micro-steps of 4,096 tokens a rank at 32 ranks, one of 16,384 at 32.
TOKENS = 1 << 19
# The example of docs/results.md, with other assumptions.
EXAMPLE = {"num_sequences": 2048, "mean_length": 1024, "max_length": 4096, "num_layers": 8, "num_steps": 2}
RANKS, MICRO_STEPS = 16, 32
COMPARED = ("static", "eplb", "trimtab", "balanced")
BASE = PRESETS["qwen3-30b-math"]
# The preset of that example, then the same with other values of what no publication gives.
ASSUMPTIONS: tuple[tuple[str, SkewPreset], ...] = (
    ("as in the preset", BASE),
    *((f"`clustering` {value:g}", replace(BASE, clustering=value)) for value in (0.0, 0.25, 0.7)),
    *((f"`drift` {value:g}", replace(BASE, drift=value)) for value in (0.0, 0.6)),
    *((f"`deviation` {value:g}", replace(BASE, deviation=value)) for value in (0.5, 1.4)),
    ("eight subjects instead of two (`qwen3-30b-mixed`)", PRESETS["qwen3-30b-mixed"]),
)
# Sequences of about the size of a rank's micro-step, so that few of them are together.
LONG = {"num_sequences": 512, "mean_length": 4096, "max_length": 4096, "num_layers": 8, "num_steps": 2}
# `deviation`, and a factor of `zipf`, with which about 93, 70 and 50% of the variance of rank loads is the same in all
# micro-steps of `LONG`, at about the max/mean of the example of docs/results.md. Found by trial.
FLUCTUATIONS = tuple(
    replace(BASE, deviation=deviation, zipf=(steeper * BASE.zipf[0], steeper * BASE.zipf[1]))
    for deviation, steeper in ((0.75, 0.97), (1.9, 1.23), (3.5, 1.7))
)
RIVALS = ("scheduled", "relibra", "foremoe", "ultraep", "echo")
DRAWS = 10


def measure_presets(seeds: Sequence[int] = tuple(range(10)), *, assumptions: bool = True) -> dict[str, Any]:
    """All figures, as `python -m experiments.presets --json` writes them.

    Args:
        seeds: of the traces; every seed draws another model.
        assumptions: False leaves out all simulations.
    """
    rows = [
        asdict(row) | {"value": statistics.median(values), "values": values, "as_stated": as_stated(row, values)}
        for preset in track(dict.fromkeys(row.preset for row in PUBLISHED), "presets", transient=True)
        for row, values in _measured(preset, seeds)
    ]
    sizes = {"seeds": list(seeds), "steps": STEPS, "tokens": TOKENS, "mean_length": MEAN_LENGTH}
    headlines = [
        {"assumption": text} | _headline(preset, seeds[0])
        for text, preset in track(ASSUMPTIONS if assumptions else (), "assumptions", transient=True)
    ]
    found = {"schema": SCHEMA, "settings": sizes, "rows": rows, "headlines": headlines}
    if assumptions:
        found["fluctuations"] = [
            _fluctuation(preset, seeds[0]) for preset in track(FLUCTUATIONS, "fluctuations", transient=True)
        ]
        found["permuted"] = _permuted(seeds[0])
    return found


def as_stated(row: PublishedSkew, values: Sequence[float]) -> bool:
    """Whether the median is inside the row's range, or outside where the row says so."""
    return (row.low <= statistics.median(values) <= row.high) == row.matches


def measure(preset: str, seed: int, tokens: int = TOKENS) -> list[tuple[PublishedSkew, float]]:
    """The figures of one seed of a preset, for each of its published rows."""
    sample = Sample(
        synthesize_preset(
            PRESETS[preset],
            num_sequences=tokens // MEAN_LENGTH,
            mean_length=MEAN_LENGTH,
            max_length=4 * MEAN_LENGTH,
            num_layers=PRESETS[preset].moe_layers,
            num_steps=STEPS,
            seed=seed,
        )
    )
    return [(row, MEASURES[row.measure][1](sample, row)) for row in PUBLISHED if row.preset == preset]


def _measured(preset: str, seeds: Sequence[int]) -> list[tuple[PublishedSkew, list[float]]]:
    by_seed = [measure(preset, seed) for seed in seeds]
    return [(each[0][0], [value for _, value in each]) for each in zip(*by_seed, strict=True)]


def common_part(loads_MLR: Array) -> float:
    """Of the variance of rank loads over their mean, the part that is the same in all micro-steps."""
    apart_MLR = loads_MLR / loads_MLR.mean(axis=2, keepdims=True) - 1
    return float(1 - apart_MLR.var(axis=0, ddof=1).mean() / np.square(apart_MLR).mean())


def _headline(preset: SkewPreset, seed: int) -> dict[str, Any]:
    """Step times of the example of docs/results.md with another preset."""
    result = _simulated(preset, seed, EXAMPLE, COMPARED)
    return {"max_over_mean": result.outcomes["static"].balance.mean, "step_time_s": _seconds(result)}


def _fluctuation(preset: SkewPreset, seed: int) -> dict[str, Any]:
    """Step times of long sequences, with balancers that plan every micro-step."""
    result = _simulated(preset, seed, LONG, (*COMPARED, *RIVALS))
    static = result.outcomes["static"]
    return {
        "deviation": preset.deviation,
        "zipf": list(preset.zipf),
        "common": common_part(static.simulated.work.loads_MLR),
        "max_over_mean": static.balance.mean,
        "step_time_s": _seconds(result),
    }


def _permuted(seed: int) -> list[dict[str, float]]:
    """Step times of the example of docs/results.md with the ids of experts in other random orders."""
    result = _simulated(BASE, seed, EXAMPLE, COMPARED[:3])
    steps = [permuted_steps(result.case, result.outcomes, draw) for draw in range(DRAWS)]
    return [{name: step.step_time_s for name, step in each.items()} for each in steps]


def _simulated(preset: SkewPreset, seed: int, size: dict[str, int], policies: Sequence[str]) -> SimulationResult:
    return trimtab.simulate(
        synthesize_preset(preset, seed=seed, **size),
        trimtab.Run(cluster="h100x8", ranks=RANKS, micro_steps=MICRO_STEPS, recompute_granularity="full"),
        policies=policies,
    )


def _seconds(result: SimulationResult) -> dict[str, float]:
    return {name: outcome.simulated.step_time_s for name, outcome in result.outcomes.items()}
