"""Measures of routing skew, from the counts of a trace."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from experiments.presets.published_skew import PublishedSkew
from trimtab.array_type import Array
from trimtab.trace import RoutingTrace
from trimtab.trace.counting import count_experts

SAMPLED_SEQUENCES = 16


class Sample:
    """The steps of a trace.

    Attributes:
        steps: the traces of the steps.
        loads_LE: `[L, E]` int64, tokens of the last step by layer and expert.
    """

    def __init__(self, trace: RoutingTrace) -> None:
        self.steps = [trace.select(np.flatnonzero(trace.steps == step)) for step in np.unique(trace.steps)]
        self.loads_LE = total_loads(self.steps[-1])


def total_loads(trace: RoutingTrace) -> Array:
    """`[L, E]` int64, tokens by layer and expert."""
    return count_experts(trace, np.zeros(trace.num_sequences, np.int64), 1)[0]


def gini(loads_XE: Array) -> Array:
    """Gini coefficient over the last axis: 0 if all experts get as many tokens, near 1 if one gets all."""
    experts = loads_XE.shape[-1]
    ascending = np.sort(loads_XE, axis=-1)
    weights_E = 2 * np.arange(1, experts + 1) - experts - 1
    return np.asarray((ascending * weights_E).sum(axis=-1) / (experts * ascending.sum(axis=-1)))


def concentration(loads_XE: Array) -> Array:
    """1 minus the entropy of the loads divided by its greatest value: 0 for even loads, 1 for a single expert."""
    shares = loads_XE / loads_XE.sum(axis=-1, keepdims=True)
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=-1)
    return np.asarray(1 - entropy / np.log(loads_XE.shape[-1]))


def busier_half(loads_LE: Array) -> Array:
    """`[L]` share of the tokens of the busier half of the expert ids: of the lower or of the upper ids."""
    halves_L2 = loads_LE.reshape(len(loads_LE), 2, -1).sum(axis=-1)
    return np.asarray(halves_L2.max(axis=-1) / halves_L2.sum(axis=-1))


def rank_loads(trace: RoutingTrace, row: PublishedSkew) -> Array:
    """`[M, L, G * R]` int64 tokens by micro-step, layer and rank, with experts at home in the order of their ids.

    Sequences fill the micro-steps' groups in the order of the trace. There are as many micro-steps as the tokens fill,
    at least one.
    """
    slices = max(trace.num_tokens // (row.ranks * row.tokens_per_rank) // row.groups, 1) * row.groups
    slice_S = trace.sequence_starts[:-1] * slices // max(1, trace.num_tokens)
    counts = count_experts(trace, slice_S, slices)
    loads_MGLR = counts.reshape(-1, row.groups, trace.num_layers, row.ranks, trace.num_experts // row.ranks).sum(
        axis=-1
    )
    return np.asarray(loads_MGLR.transpose(0, 2, 1, 3).reshape(len(loads_MGLR), trace.num_layers, -1))


def ratios(sample: Sample, row: PublishedSkew) -> Array:
    """`[M, L]` tokens of the busiest rank divided by those of the mean rank, in the last step."""
    loads_MLR = rank_loads(sample.steps[-1], row)
    return np.asarray(loads_MLR.max(axis=-1) / loads_MLR.mean(axis=-1))


def step_correlation(sample: Sample, row: PublishedSkew) -> float:
    """Correlation of rank loads in a step's first micro-step with those one step later, mean over layers."""
    before_LR, after_LR = (rank_loads(step, row)[0] for step in sample.steps[:2])
    return float(np.mean([np.corrcoef(one, other)[0, 1] for one, other in zip(before_LR, after_LR, strict=True)]))


def persistence(sample: Sample, row: PublishedSkew) -> float:
    """Part of the variance of rank loads that is the same in all micro-steps of a step, mean over layers."""
    loads_MLR = rank_loads(sample.steps[-1], row)
    relative_MLR = loads_MLR / loads_MLR.mean(axis=-1, keepdims=True) - 1
    fixed_L = relative_MLR.mean(axis=0).var(axis=-1)
    return float((fixed_L / np.square(relative_MLR).mean(axis=(0, 2))).mean())


def sequence_loads(sample: Sample) -> Array:
    """`[S, L, E]` int64, tokens by expert of some sequences of the last step."""
    trace = sample.steps[-1]
    count = min(SAMPLED_SEQUENCES, trace.num_sequences)
    return count_experts(trace.select(np.arange(count)), np.arange(count), count)


def sequence_concentration(sample: Sample) -> float:
    """Concentration of a sequence in a layer, median."""
    return float(np.median(concentration(sequence_loads(sample))))


def sequence_hottest(sample: Sample) -> float:
    """Share of a sequence's rows in a layer that its hottest expert has, median."""
    loads_SLE = sequence_loads(sample)
    return float(np.median(loads_SLE.max(axis=-1) / loads_SLE.sum(axis=-1)))


MEASURES: dict[str, tuple[str, Callable[[Sample, PublishedSkew], float]]] = {
    "half_mean": (
        "busier half of the ids, mean layer",
        lambda s, _: float(busier_half(s.loads_LE).mean()),
    ),
    "half_worst": ("busier half of the ids, worst layer", lambda s, _: float(busier_half(s.loads_LE).max())),
    "gini": ("Gini of expert loads, mean layer", lambda s, _: float(gini(s.loads_LE).mean())),
    "rank_mean": ("max/mean of rank loads", lambda s, row: float(ratios(s, row).mean())),
    "rank_worst": ("max/mean, worst layer", lambda s, row: float(ratios(s, row).mean(axis=0).max())),
    "rank_p1": ("max/mean, first percentile", lambda s, row: float(np.percentile(ratios(s, row), 1))),
    "rank_p99": ("max/mean, 99th percentile", lambda s, row: float(np.percentile(ratios(s, row), 99))),
    "step_correlation": ("correlation of rank loads with those one step later", step_correlation),
    "persistence": ("part of the variance of rank loads that all micro-steps of a step share", persistence),
    "sequence_concentration": (
        "one sequence: 1 - entropy / log(experts)",
        lambda s, _: sequence_concentration(s),
    ),
    "sequence_hottest": ("one sequence: share of the hottest expert", lambda s, _: sequence_hottest(s)),
}
"""Description and function of each measure."""
