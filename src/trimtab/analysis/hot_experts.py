"""Hot experts, and how long they stay hot.

An expert is hot in an instance if it has more than twice the mean expert's tokens. This is unlikely by chance: with 16
tokens for the mean expert it takes four standard deviations, and micro-steps have hundreds. It is also relevant for a
rank: of E / R experts, a hot one adds R / E to the rank's load over the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trimtab.analysis.balance import half_sums
from trimtab.analysis.trace_counts import summed
from trimtab.array_type import Array

HOT_FACTOR = 2
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
class RunCount:
    """Number of runs of some lengths; a run is a series of consecutive micro-steps of a step in which an expert is hot.

    Attributes:
        up_to: longest run that is counted here; shorter ones may be counted in the entry before. None: no limit.
    """

    up_to: int | None
    count: int


@dataclass(frozen=True)
class HotExperts:
    """Hot experts of a trace. The field names are keys of the JSON.

    Attributes:
        per_instance: mean number.
        token_part: part of the tokens that they compute.
        persistence: part of hot experts that are also hot in the step's next micro-step; None with no two micro-steps
            in a step.
        chance: part of all experts that are hot: the value of `persistence` if hot experts were independent between
            micro-steps.
        runs: numbers of runs by length.
        mean_run: micro-steps; 0 where nothing is hot.
        overlap_steps: number of experts that are hot in a step's sum and in the next one's, divided by that of experts
            hot in either; mean over layers and steps. None with one step, or where none is hot.
        overlap_halves: of the first and second half of a step.
        hottest: by `over_mean`, hottest first.
    """

    per_instance: float
    token_part: float
    persistence: float | None
    chance: float
    runs: tuple[RunCount, ...]
    mean_run: float
    overlap_steps: float | None
    overlap_halves: float | None
    hottest: tuple[HotExpert, ...]


def hot_mask(counts: Array) -> Array:
    """Mask of hot experts, bool, for tokens `[..., E]`."""
    return counts * counts.shape[-1] > HOT_FACTOR * counts.sum(axis=-1, keepdims=True)


def hot_experts(counts_MLE: Array, step_starts: Array) -> HotExperts:
    """Hot experts of every instance, of whole steps and of their halves."""
    hot_MLE = hot_mask(counts_MLE)
    instances = max(1, int(np.count_nonzero(counts_MLE.sum(axis=-1))))
    total, num_hot = int(counts_MLE.sum()), int(np.count_nonzero(hot_MLE))
    inside = np.setdiff1d(np.arange(len(counts_MLE) - 1), step_starts[1:-1] - 1)
    was = int(np.count_nonzero(hot_MLE[inside]))
    lengths, longest_LE = _runs(hot_MLE, step_starts)
    runs = [
        RunCount(high, int(np.count_nonzero((lengths > low) & (lengths <= high)))) for low, high in pairwise((0, *RUNS))
    ]
    runs.append(RunCount(None, int(np.count_nonzero(lengths > RUNS[-1]))))
    steps_PLE = summed(counts_MLE, step_starts[:-1], step_starts[1:])
    return HotExperts(
        per_instance=num_hot / instances,
        token_part=int(counts_MLE[hot_MLE].sum()) / total if total else 0.0,
        persistence=int(np.count_nonzero(hot_MLE[inside] & hot_MLE[inside + 1])) / was if was else None,
        chance=num_hot / (instances * counts_MLE.shape[-1]),
        runs=tuple(runs),
        mean_run=float(lengths.mean()) if len(lengths) else 0.0,
        overlap_steps=_overlap(hot_mask(steps_PLE[:-1]), hot_mask(steps_PLE[1:])),
        overlap_halves=_overlap(*map(hot_mask, half_sums(counts_MLE, step_starts))),
        hottest=_hottest(counts_MLE.sum(axis=0), hot_MLE, longest_LE),
    )


def _runs(hot_MLE: Array, step_starts: Array) -> tuple[Array, Array]:
    """Lengths of all runs, and the longest of every expert `[L, E]`. Runs end with their step."""
    starts = set(step_starts.tolist())
    current_LE = np.zeros(hot_MLE.shape[1:], np.int64)
    longest_LE = current_LE.copy()
    found = []
    for m in range(len(hot_MLE) + 1):
        continues_LE = hot_MLE[m] if m not in starts else np.zeros_like(current_LE, bool)
        found.append(current_LE[(current_LE > 0) & ~continues_LE])
        current_LE = np.where(continues_LE, current_LE, 0)
        if m < len(hot_MLE):
            current_LE = current_LE + hot_MLE[m]
        np.maximum(longest_LE, current_LE, out=longest_LE)
    return np.concatenate(found), longest_LE


def _overlap(one: Array, other: Array) -> float | None:
    """Size of the intersection over that of the union of two masks `[..., E]`, mean where the union is not empty."""
    either = np.count_nonzero(one | other, axis=-1)
    both = np.count_nonzero(one & other, axis=-1)
    return float((both[either > 0] / either[either > 0]).mean()) if either.any() else None


def _hottest(counts_LE: Array, hot_MLE: Array, longest_LE: Array) -> tuple[HotExpert, ...]:
    over_LE = counts_LE * counts_LE.shape[1] / np.maximum(1, counts_LE.sum(axis=1, keepdims=True))
    part_LE = hot_MLE.mean(axis=0)
    order = np.argsort(-over_LE, axis=None, kind="stable")[:SHOWN]
    return tuple(
        HotExpert(layer, expert, *(array[layer, expert].item() for array in (over_LE, part_LE, longest_LE)))
        for layer, expert in (divmod(int(index), counts_LE.shape[1]) for index in order)
    )
