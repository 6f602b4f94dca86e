"""Imbalance of ranks: over all instances, by layer, micro-step size and number of ranks, and of whole steps.

`max_vio` is max/mean - 1 of rank loads (verl, VeOmni, prime-rl), `balancedness` mean/max (vLLM, SGLang). Instances
without any known route are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from trimtab.analysis.trace_counts import TraceCounts, summed
from trimtab.array_type import Array

# Other sizes of micro-steps; smaller ones need parts, larger ones enough micro-steps in a step.
FACTORS = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4), Fraction(8))
LEAST_MOST_RANKS = 64
RANKS_FACTOR = 8


@dataclass(frozen=True)
class Spread:
    """A figure over instances."""

    mean: float
    p50: float
    p99: float
    worst: float


EVEN = Spread(1.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Balance:
    """Rank loads of some instances.

    Attributes:
        instances: number of instances with a load.
        max_over_mean: of each instance; `max_vio` is this minus 1. 1 where there is no instance.
        balancedness: mean/max of each; the worst is the smallest; 99% exceed p99.
        lost: the part of expert time for which a rank is idle on average: 1 - sum of means / sum of maxima.
    """

    instances: int
    max_over_mean: Spread
    balancedness: Spread
    lost: float

    @property
    def max_vio(self) -> Spread:
        ratio = self.max_over_mean
        return Spread(ratio.mean - 1, ratio.p50 - 1, ratio.p99 - 1, ratio.worst - 1)


@dataclass(frozen=True)
class SizeBalance:
    """Balance with micro-steps of another size, and with other numbers of ranks.

    Attributes:
        factor: size relative to the given micro-steps; None for a whole step in one.
        tokens: mean tokens of such a micro-step, all ranks together.
        micro_steps: their number; incomplete ones at a step's end are left out.
        by_ranks: number of ranks: balance.
    """

    factor: float | None
    tokens: float
    micro_steps: int
    by_ranks: dict[int, Balance]


@dataclass(frozen=True)
class Stability:
    """Stability of busy ranks and experts between a step's sum and its micro-steps.

    Attributes:
        step_max_over_mean: of loads summed over each step, mean over steps and layers.
        micro_step_max_over_mean: of each instance, mean.
        busiest_rank_changes: part of the instances whose busiest rank is not their step's and layer's.
        overlap_micro_steps: of an instance's expert loads with the next micro-step's, mean; 1 if in the same
            proportions, 0 if no expert is in both. None with no two micro-steps in a step.
        overlap_steps: of a step's with the next step's; None with one step.
        overlap_halves: of the first half of a step's micro-steps with the second; None with no two in a step.
    """

    step_max_over_mean: float
    micro_step_max_over_mean: float
    busiest_rank_changes: float
    overlap_micro_steps: float | None
    overlap_steps: float | None
    overlap_halves: float | None


def max_over_mean_or_nan(loads: Array) -> Array:
    """Load of the busiest rank divided by the mean load, `[..., R]` to `[...]` float64; NaN without any load."""
    totals = loads.sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(totals > 0, loads.max(axis=-1) * loads.shape[-1] / totals, np.nan)


def balance(loads: Array) -> Balance:
    """`Balance` of rank loads `[..., R]`, integers or floats."""
    found = max_over_mean_or_nan(loads).ravel()
    found = found[~np.isnan(found)]
    if not len(found):
        return Balance(0, EVEN, EVEN, 0.0)
    even = 1 / found
    return Balance(len(found), _spread(found, 99, found.max()), _spread(even, 1, even.min()), lost_part(loads))


def _spread(values: Array, p99_percentile: int, worst: float) -> Spread:
    p50, p99 = np.percentile(values, (50, p99_percentile)).tolist()
    return Spread(float(values.mean()), p50, p99, float(worst))


def lost_part(loads: Array) -> float:
    """1 - sum of means / sum of maxima over instances; 0 without load."""
    longest = float(loads.max(axis=-1).sum())
    return max(0.0, 1 - float(loads.sum()) / loads.shape[-1] / longest) if longest else 0.0


def home_loads(counts: Array, ranks: int) -> Array:
    """Loads `[..., R]` of contiguous homes: int64 from tokens `[..., E]`, float64 from seconds."""
    kind = np.float64 if counts.dtype.kind == "f" else np.int64
    return counts.reshape(*counts.shape[:-1], ranks, -1).sum(axis=-1, dtype=kind)


def rank_numbers(num_experts: int, ranks: int) -> list[int]:
    """Numbers of ranks to compare: powers of two that divide the experts, and the given one."""
    most = min(num_experts, max(LEAST_MOST_RANKS, RANKS_FACTOR * ranks))
    powers = {2**power for power in range(1, most.bit_length()) if 2**power <= most and num_experts % 2**power == 0}
    return sorted(powers | {ranks})


def by_size(counts: TraceCounts, ranks: Sequence[int]) -> list[SizeBalance]:
    """Balance of micro-steps from a quarter to eight times the given size, if the data allow it, and of whole steps."""
    found = []
    steps = counts.step_starts * counts.parts
    for factor in FACTORS:
        starts, ends = _groups(counts, factor)
        whole_steps = np.array_equal(starts, steps[:-1]) and np.array_equal(ends, steps[1:])
        if len(starts) and (factor <= 1 or not whole_steps):
            found.append(_at_size(counts, float(factor), starts, ends, ranks))
    found.append(_at_size(counts, None, steps[:-1], steps[1:], ranks))
    return found


def _groups(counts: TraceCounts, factor: Fraction) -> tuple[Array, Array]:
    """First and last + 1 part of each micro-step of another size. Micro-steps do not span steps."""
    size = factor * counts.parts
    if size.denominator > 1:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    steps = counts.step_starts * counts.parts
    starts = [np.arange(first, end - int(size) + 1, int(size)) for first, end in pairwise(steps)]
    together = np.concatenate(starts)
    return together, together + int(size)


def _at_size(
    counts: TraceCounts, factor: float | None, starts: Array, ends: Array, ranks: Sequence[int]
) -> SizeBalance:
    counts_GLE = summed(counts.counts_FLE, starts, ends)
    # Of the layer with most tokens: routes may be unknown in others.
    tokens = counts_GLE.sum(axis=(0, 2)).max() / counts.top_k / len(counts_GLE)
    by_ranks = {number: balance(home_loads(counts_GLE, number)) for number in ranks}
    return SizeBalance(factor, float(tokens), len(counts_GLE), by_ranks)


def stability(counts_MLE: Array, step_starts: Array, ranks: int) -> Stability:
    """Changes inside steps and between them."""
    loads_MLR = home_loads(counts_MLE, ranks)
    sums_PLE = summed(counts_MLE, step_starts[:-1], step_starts[1:])
    sums_PLR = home_loads(sums_PLE, ranks)
    step_M = np.repeat(np.arange(len(step_starts) - 1), np.diff(step_starts))
    has_load_ML = loads_MLR.sum(axis=-1) > 0
    busiest_ML, usual_ML = loads_MLR.argmax(axis=-1), sums_PLR.argmax(axis=-1)[step_M]
    inside = np.flatnonzero(np.diff(step_M) == 0)
    return Stability(
        step_max_over_mean=float(np.nanmean(max_over_mean_or_nan(sums_PLR))),
        micro_step_max_over_mean=float(np.nanmean(max_over_mean_or_nan(loads_MLR))),
        busiest_rank_changes=float((busiest_ML != usual_ML)[has_load_ML].mean()),
        overlap_micro_steps=known_mean(np.array([overlap(counts_MLE[m], counts_MLE[m + 1]) for m in inside.tolist()])),
        overlap_steps=known_mean(overlap(sums_PLE[:-1], sums_PLE[1:])),
        overlap_halves=known_mean(overlap(*half_sums(counts_MLE, step_starts))),
    )


def overlap(one: Array, other: Array) -> Array:
    """Overlap of two distributions `[..., E]`, `[...]`: the sum of the smaller proportions; NaN without load."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = one / one.sum(axis=-1, keepdims=True), other / other.sum(axis=-1, keepdims=True)
    return np.minimum(*shares).sum(axis=-1)


def half_sums(counts_MLE: Array, step_starts: Array) -> tuple[Array, Array]:
    """Counts of the first and the second half of each step that has two micro-steps, `[P, L, E]` int64 each."""
    whole = np.diff(step_starts) > 1
    starts, ends = step_starts[:-1][whole], step_starts[1:][whole]
    middles = (starts + ends) // 2
    return summed(counts_MLE, starts, middles), summed(counts_MLE, middles, ends)


def known_mean(values: Array) -> float | None:
    """Mean of the values that are not NaN; None if there is none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


@dataclass(frozen=True)
class DomainSkew:
    """Skew of the sequences of one domain.

    Attributes:
        name: label in the trace, "" without one.
        token_part: of all tokens with a known route.
        busier_half_share: part of the tokens that the busier half of the experts gets, mean over layers; 0.5 is even.
        hottest_over_mean: the busiest expert over the mean one, mean over layers.
        max_over_mean: of rank loads if there were only this domain, mean over layers.
    """

    name: str
    token_part: float
    busier_half_share: float
    hottest_over_mean: float
    max_over_mean: float


def domain_skew(counts_DLE: Array, names: Sequence[str], ranks: int) -> list[DomainSkew]:
    """Skew of every domain. Domains without a known route are left out."""
    total = counts_DLE.sum()
    found = []
    for name, counts_LE in zip(names, counts_DLE, strict=True):
        tokens_L = counts_LE.sum(axis=1)
        if not tokens_L.any():
            continue
        busier_L = np.sort(counts_LE, axis=1)[:, (counts_LE.shape[1] + 1) // 2 :].sum(axis=1)
        known = tokens_L > 0
        found.append(
            DomainSkew(
                name,
                float(counts_LE.sum() / total),
                float((busier_L[known] / tokens_L[known]).mean()),
                float(np.nanmean(max_over_mean_or_nan(counts_LE))),
                float(np.nanmean(max_over_mean_or_nan(home_loads(counts_LE, ranks)))),
            )
        )
    return found


def domain_overlap(counts_DLE: Array) -> Array:
    """`[D, D]`: overlap of the expert loads of two domains (see `overlap`), mean over layers. 0 without load."""
    shared = np.zeros((len(counts_DLE), len(counts_DLE)))
    for index, counts_LE in enumerate(counts_DLE):
        found_DL = overlap(counts_LE, counts_DLE)
        known = ~np.isnan(found_DL)
        shared[index] = np.where(known, found_DL, 0).sum(axis=1) / np.maximum(1, known.sum(axis=1))
    return shared
