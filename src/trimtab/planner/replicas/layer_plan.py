"""Replicas and quotas of all micro-steps of one layer: one task of the planner, compiled and without the GIL."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner.replicas.replicas import place_replicas
from trimtab.planner.replicas.split import split_tokens

PARTS_PER_WHOLE = 1_000_000


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """The part of a `StepPlan` that belongs to one layer.

    Attributes:
        replicas_M: `[M]` int64, replicas of each micro-step.
        experts, ranks: `[P]` int16.
        quotas_P: `[P]` int64, quotas of each replica.
        sources: `[Q]` int16.
        tokens: `[Q]` int32.
    """

    replicas_M: Array
    experts: Array
    ranks: Array
    quotas_P: Array
    sources: Array
    tokens: Array


def plan_layer(
    counts_MLRE: Array,
    fixed_MR: Array,
    layer: int,
    wanted_M: Array,
    home_E: Array,
    *,
    ranks_per_node: int,
    slots: int,
    threshold: float,
    smallest_share: int,
) -> LayerPlan:
    """Replicas and split for every wanted micro-step of a layer.

    Args:
        counts_MLRE: `[M, L, R, E]` int32, known rows; only `layer` is read.
        fixed_MR: `[M, R]` int64, expected rows of unknown routes in the layer, which stay at their home rank.
        wanted_M: `[M]` bool, micro-steps that may have replicas.
        home_E: `[E]` int16 homes of the layer's experts.
        threshold: max/mean load up to which an instance is not changed; loads are known and expected rows.
    """
    num_ranks = counts_MLRE.shape[2]
    experts_by_home = np.argsort(home_E, kind="stable")
    home_starts = np.searchsorted(home_E[experts_by_home], np.arange(num_ranks + 1))
    # In parts per million: decisions in integers are the same on every machine.
    parts = round(threshold * PARTS_PER_WHOLE)
    arrays = _plan_layer(
        counts_MLRE, np.ascontiguousarray(fixed_MR), layer, wanted_M, home_E, experts_by_home, home_starts,
        ranks_per_node, slots, parts, smallest_share,
    )  # fmt: skip
    return LayerPlan(*arrays)


@kernel
def _plan_layer(  # type: ignore[no-untyped-def]
    counts_MLRE, fixed_MR, layer, wanted_M, home_E, experts_by_home, home_starts, ranks_per_node, slots,
    threshold_parts, smallest_share,
):  # fmt: skip
    num_micro_steps, _, num_ranks, num_experts = counts_MLRE.shape
    most_replicas = num_ranks * slots
    counts_E = np.empty(num_experts, np.int64)
    replicas_3P = np.empty((3, most_replicas), np.int64)
    quotas_PR = np.empty((most_replicas, num_ranks), np.int64)
    replicas_M = np.zeros(num_micro_steps, np.int64)
    experts = np.empty(num_micro_steps * most_replicas, np.int16)
    ranks = np.empty(num_micro_steps * most_replicas, np.int16)
    quotas_P = np.empty(num_micro_steps * most_replicas, np.int64)
    sources = np.empty(most_replicas * num_ranks, np.int16)
    tokens = np.empty(most_replicas * num_ranks, np.int32)
    replica = 0
    quota = 0
    for m in range(num_micro_steps):
        if not wanted_M[m]:
            continue
        counts_RE = counts_MLRE[m, layer]
        _sum_sources(counts_RE, counts_E)
        fixed_R = fixed_MR[m]
        rows = counts_E.sum() + fixed_R.sum()
        threshold_load = rows * threshold_parts // (num_ranks * PARTS_PER_WHOLE)
        count = place_replicas(
            counts_E, fixed_R, home_E, experts_by_home, home_starts, ranks_per_node, slots, threshold_load,
            smallest_share, replicas_3P,
        )  # fmt: skip
        split_tokens(counts_RE, home_E, ranks_per_node, replicas_3P, count, quotas_PR)
        replicas_M[m] = count
        if quota + count * num_ranks > len(sources):
            sources = _grown(sources)
            tokens = _grown(tokens)
        for p in range(count):
            experts[replica] = replicas_3P[0, p]
            ranks[replica] = replicas_3P[1, p]
            before = quota
            for r in range(num_ranks):
                if quotas_PR[p, r] > 0:
                    sources[quota] = r
                    tokens[quota] = quotas_PR[p, r]
                    quota += 1
            quotas_P[replica] = quota - before
            replica += 1
    # Copies, so that unused memory is freed.
    return (
        replicas_M,
        experts[:replica].copy(),
        ranks[:replica].copy(),
        quotas_P[:replica].copy(),
        sources[:quota].copy(),
        tokens[:quota].copy(),
    )


@kernel
def _sum_sources(counts_RE, counts_E):  # type: ignore[no-untyped-def]
    counts_E[:] = 0
    for r in range(counts_RE.shape[0]):
        for e in range(counts_RE.shape[1]):
            counts_E[e] += counts_RE[r, e]


@kernel
def _grown(values):  # type: ignore[no-untyped-def]
    larger = np.empty(2 * len(values), values.dtype)
    larger[: len(values)] = values
    return larger
