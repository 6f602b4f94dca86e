"""Repeated measurements in alternating rounds, so that a change of the machine's speed affects all variants alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from rich.progress import track

WARM_UP_ROUNDS = 2
BOOTSTRAP_SAMPLES = 2000
Name = TypeVar("Name")
Result = TypeVar("Result")


def alternate(
    variants: Mapping[Name, Callable[[], Result]], rounds: int, *, warm_up: int = WARM_UP_ROUNDS, progress: str = ""
) -> dict[Name, list[Result]]:
    """Call every variant once per round, and return the results of each, one per round.

    Args:
        variants: by name. The order in which they are called rotates from round to round.
        rounds: rounds that are returned.
        warm_up: rounds before them.
        progress: title of a progress bar; none if empty.
    """
    names = list(variants)
    results: dict[Name, list[Result]] = {name: [] for name in names}
    for number in track(range(warm_up + rounds), progress, disable=not progress, transient=True):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            result = variants[name]()
            if number >= warm_up:
                results[name].append(result)
    return results


def medians(variants: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int) -> dict[str, dict[str, float]]:
    """Median over alternating rounds of every figure of every variant."""
    return {
        name: {figure: statistics.median(each[figure] for each in results) for figure in results[0]}
        for name, results in alternate(variants, rounds).items()
    }


def median_with_interval(values: Sequence[float], seed: int = 0) -> tuple[float, list[float]]:
    """Median of one value per round, and its 95% bootstrap interval [low, high]."""
    rng = np.random.default_rng(seed)
    samples = rng.choice(np.asarray(values), (BOOTSTRAP_SAMPLES, len(values)))
    low, high = np.percentile(np.median(samples, axis=1), [2.5, 97.5])
    return statistics.median(values), [float(low), float(high)]
