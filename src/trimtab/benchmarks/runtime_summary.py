"""Figures of `trimtab bench runtime`: ratios of step times for each seed, their median, interval and range."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.calibration.alternating_rounds import BOOTSTRAP_SAMPLES

# Step times of a variant by seed, one per round.
SeedTimes = Mapping[tuple[int, str], list[float]]


def summarise_steps(step_s: SeedTimes, static_max_over_mean: list[list[float]]) -> dict[str, Any]:
    """Figures of every seed, and of all seeds together.

    Args:
        step_s: seconds of every variant on every seed's routing. The rounds of all lists are the same.
        static_max_over_mean: `[seeds, layers]`.

    Returns:
        `seeds`, a dictionary per seed; and for each ratio its median over seeds, its 95% bootstrap interval over rounds
        (`_interval`) and the lowest and highest seed (`_range`); the last also for `static_max_over_mean`, which is the
        mean over layers.
    """
    names = list(dict.fromkeys(name for _, name in step_s))
    seeds = range(len(static_max_over_mean))
    times = {name: np.array([step_s[seed, name] for seed in seeds]) for name in names}
    ratios_S = _ratios(times)
    skew_S = [statistics.mean(layers) for layers in static_max_over_mean]
    figures: dict[str, Any] = {
        "static_max_over_mean": statistics.median(skew_S),
        "static_max_over_mean_range": [min(skew_S), max(skew_S)],
        "seeds": [
            {
                "seed": seed,
                "static_max_over_mean": static_max_over_mean[seed],
                "median_s": {name: float(np.median(times[name][seed])) for name in names},
                **{ratio: float(values_S[seed]) for ratio, values_S in ratios_S.items()},
            }
            for seed in seeds
        ],
    }
    resampled = {ratio: np.median(values_BS, axis=1) for ratio, values_BS in _ratios(_resampled(times)).items()}
    for ratio, values_S in ratios_S.items():
        figures[ratio] = float(np.median(values_S))
        figures[f"{ratio}_interval"] = np.percentile(resampled[ratio], [2.5, 97.5]).tolist()
        figures[f"{ratio}_range"] = [float(values_S.min()), float(values_S.max())]
    return figures


def _ratios(times: Mapping[str, Array]) -> dict[str, Array]:
    """Ratios of step times `[..., rounds]`, compared within each round: `[...]`."""
    static, trimtab, balanced = times["static"], times["trimtab"], times["balanced"]
    ratios = {
        # The median difference, not the median ratio: where there is little to gain, single ratios are arbitrary.
        "gain_captured": np.median(static - trimtab, axis=-1) / np.median(static - balanced, axis=-1),
        "fraction_of_balanced": np.median(balanced / trimtab, axis=-1),
        "overhead_when_balanced": np.median(balanced / times["native"], axis=-1) - 1,
    }
    if "node-blind" in times:
        ratios["speedup_vs_node_blind"] = np.median(times["node-blind"] / trimtab, axis=-1)
    return ratios


def _resampled(times: Mapping[str, Array]) -> dict[str, Array]:
    """`[samples, seeds, rounds]` of times `[seeds, rounds]`: rounds with replacement, the same for all variants."""
    seeds, rounds = times["static"].shape
    drawn_BSN = np.random.default_rng(0).integers(rounds, size=(BOOTSTRAP_SAMPLES, seeds, rounds))
    return {name: times_SN[np.arange(seeds)[:, None], drawn_BSN] for name, times_SN in times.items()}
