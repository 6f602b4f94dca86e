"""Ratios of step times with and without balancing, from alternating rounds, and their intervals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.calibration.alternating_rounds import BOOTSTRAP_SAMPLES


def summarise_pairs(step_s: Mapping[str, Sequence[float]], plans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians and ratios of step times with and without balancing, on even and on skewed routing.

    Args:
        step_s: seconds of `plain_balanced`, `planned_balanced`, `plain_skewed` and `planned_skewed`, one per round.
            Skewed rounds have the seeds 0, 1, ... in turn.
        plans: figures of the plan on each seed's routing.

    Returns:
        `variants`, times of each variant; `seeds`, figures of each seed; the ratios. `overhead_when_balanced` is the
        median over rounds. `gain_captured` of a seed is the median time that the plan saves, divided by the median
        time that skew costs; of all seeds, the sum of the first divided by the sum of the second. Intervals
        (`_interval`) are 95% bootstrap over rounds.
    """
    times = {name: np.array(seconds) for name, seconds in step_s.items()}
    rounds = len(times["plain_balanced"])
    of_seeds = [np.arange(seed, rounds, len(plans)) for seed in range(len(plans))]
    rng = np.random.default_rng(0)
    samples_SBN = [rng.choice(chosen, (BOOTSTRAP_SAMPLES, len(chosen))) for chosen in of_seeds]
    seconds_2SB = np.stack([_saved_and_lost(times, drawn_BN) for drawn_BN in samples_SBN], axis=1)
    seconds_2S = np.stack([_saved_and_lost(times, chosen) for chosen in of_seeds], axis=1)
    by_seed = zip(plans, seconds_2S.T.tolist(), of_seeds, strict=True)
    overhead_B = _overhead(times, rng.integers(rounds, size=(BOOTSTRAP_SAMPLES, rounds)))
    return {
        "variants": {name: {"median_s": statistics.median(s), "step_s": list(s)} for name, s in step_s.items()},
        "overhead_when_balanced": float(_overhead(times, np.arange(rounds))),
        "overhead_when_balanced_interval": percentiles(overhead_B),
        "gain_captured": float(np.divide(*seconds_2S.sum(axis=1))),
        "gain_captured_interval": percentiles(np.divide(*seconds_2SB.sum(axis=1))),
        "seeds": [
            {
                "seed": seed,
                **plan,
                "gain_captured": saved / lost,
                "median_s": {name: float(np.median(seconds[chosen])) for name, seconds in times.items()},
            }
            for seed, (plan, (saved, lost), chosen) in enumerate(by_seed)
        ],
    }


def _overhead(times: Mapping[str, Array], rounds: Array) -> Array:
    ratios = times["planned_balanced"][rounds] / times["plain_balanced"][rounds]
    return np.asarray(np.median(ratios, axis=-1) - 1)


def _saved_and_lost(times: Mapping[str, Array], rounds: Array) -> Array:
    """Median seconds that the plan saves and that skew costs, `[2, ...]`."""
    skewed = times["plain_skewed"][rounds]
    differences = skewed - times["planned_skewed"][rounds], skewed - times["plain_balanced"][rounds]
    return np.median(differences, axis=-1)


def percentiles(samples: Array) -> list[float]:
    """The 95% interval of bootstrap samples, low and high."""
    return [float(bound) for bound in np.percentile(samples, [2.5, 97.5])]
