"""Hot experts, and how long they stay hot.

An expert is hot in an instance if it has more than twice the mean expert's tokens. This is unlikely by chance: with 16
tokens for the mean expert it takes four standard deviations, and micro-steps have hundreds. It is also relevant for a
rank: of E / R experts, a hot one adds R / E to the rank's load over the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trimtab.analysis.balance import halves
from trimtab.analysis.counted import summed
from trimtab.array_type import Array

HOT = 2
# Longest run of each line of the distribution; a last one holds the rest.
RUNS = (1, 2, 4, 8, 16, 32)
SHOWN = 10


@dataclass(frozen=True)
class HotExpert:
    """One expert of one MoE layer, by index.

    Attributes:
        over_mean: tokens over the mean expert's, of the whole trace.
        hot_part: part of the micro-steps in which it is hot.
        longest_run: consecutive micro-steps of a step.
    """

    layer: int
    expert: int
    over_mean: float
    hot_part: float
    longest_run: int


@dataclass(frozen=True)
class Hot:
    """Hot experts of a trace.

    Attributes:
        per_instance: mean number.
        token_part: part of the tokens that they compute.
        stay: part of hot experts that are also hot in the step's next micro-step; None with no two micro-steps in a
            step.
        chance: part of all experts that are hot: the value of `stay` if hot experts were independent between
            micro-steps.
        runs: `(longest, count)`: runs of consecutive micro-steps of a step; `longest` of a line, None for the last.
        mean_run: micro-steps; 0 where nothing is hot.
        alike_steps: experts that are hot in a step's sum and in the next one's, over those in either; mean over layers
            and steps. None with one step, or where none is hot.
        alike_halves: of the first and second half of a step.
        hottest: by `over_mean`, hottest first.
    """

    per_instance: float
    token_part: float
    stay: float | None
    chance: float
    runs: tuple[tuple[int | None, int], ...]
    mean_run: float
    alike_steps: float | None
    alike_halves: float | None
    hottest: tuple[HotExpert, ...]


def hot_mask(counts: Array) -> Array:
    """Mask of hot experts, bool, for tokens `[..., E]`."""
    return counts * counts.shape[-1] > HOT * counts.sum(axis=-1, keepdims=True)


def hot_experts(counts_MLE: Array, step_starts: Array) -> Hot:
    """Hot experts of every instance, of whole steps and of their halves."""
    hot_MLE = hot_mask(counts_MLE)
    instances = max(1, int(np.count_nonzero(counts_MLE.sum(axis=-1))))
    total = int(counts_MLE.sum())
    inside = np.setdiff1d(np.arange(len(counts_MLE) - 1), step_starts[1:-1] - 1)
    was = int(np.count_nonzero(hot_MLE[inside]))
    lengths, longest_LE = _runs(hot_MLE, step_starts)
    edges = [0, *RUNS]
    runs: list[tuple[int | None, int]] = [
        (high, int(np.count_nonzero((lengths > low) & (lengths <= high)))) for low, high in pairwise(edges)
    ]
    runs.append((None, int(np.count_nonzero(lengths > RUNS[-1]))))
    steps_PLE = summed(counts_MLE, step_starts[:-1])
    return Hot(
        per_instance=int(np.count_nonzero(hot_MLE)) / instances,
        token_part=int(counts_MLE[hot_MLE].sum()) / total if total else 0.0,
        stay=int(np.count_nonzero(hot_MLE[inside] & hot_MLE[inside + 1])) / was if was else None,
        chance=int(np.count_nonzero(hot_MLE)) / (instances * counts_MLE.shape[-1]),
        runs=tuple(runs),
        mean_run=float(lengths.mean()) if len(lengths) else 0.0,
        alike_steps=_alike(hot_mask(steps_PLE[:-1]), hot_mask(steps_PLE[1:])),
        alike_halves=_halves_alike(counts_MLE, step_starts),
        hottest=_hottest(counts_MLE.sum(axis=0), hot_MLE, longest_LE),
    )


def _runs(hot_MLE: Array, step_starts: Array) -> tuple[Array, Array]:
    """Lengths of all runs, and the longest of every expert `[L, E]`. Runs end with their step."""
    starts = set(step_starts.tolist())
    current_LE = np.zeros(hot_MLE.shape[1:], np.int64)
    longest_LE = current_LE.copy()
    found = []
    for m in range(len(hot_MLE) + 1):
        goes_on_LE = hot_MLE[m] if m not in starts else np.zeros_like(current_LE, bool)
        found.append(current_LE[(current_LE > 0) & ~goes_on_LE])
        current_LE = np.where(goes_on_LE, current_LE, 0)
        if m < len(hot_MLE):
            current_LE = current_LE + hot_MLE[m]
        np.maximum(longest_LE, current_LE, out=longest_LE)
    return np.concatenate(found), longest_LE


def _halves_alike(counts_MLE: Array, step_starts: Array) -> float | None:
    masks = [
        (hot_mask(counts_MLE[first:middle].sum(axis=0)), hot_mask(counts_MLE[middle:end].sum(axis=0)))
        for first, middle, end in halves(step_starts)
    ]
    return _alike(*(np.array(side) for side in zip(*masks, strict=True))) if masks else None


def _alike(one: Array, other: Array) -> float | None:
    either = np.count_nonzero(one | other, axis=-1)
    both = np.count_nonzero(one & other, axis=-1)
    return float((both[either > 0] / either[either > 0]).mean()) if either.any() else None


def _hottest(counts_LE: Array, hot_MLE: Array, longest_LE: Array) -> tuple[HotExpert, ...]:
    over_LE = counts_LE * counts_LE.shape[1] / np.maximum(1, counts_LE.sum(axis=1, keepdims=True))
    part_LE = hot_MLE.mean(axis=0)
    order = np.argsort(-over_LE, axis=None, kind="stable")[:SHOWN]
    return tuple(
        HotExpert(layer, expert, float(over_LE[layer, expert]), float(part_LE[layer, expert]), int(longest))
        for layer, expert in (divmod(int(index), counts_LE.shape[1]) for index in order)
        for longest in [longest_LE[layer, expert]]
    )
