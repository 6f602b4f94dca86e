"""Replicas and quotas of all micro-steps of one layer: one task of the planner, compiled and without the GIL."""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner.replicas.kernel_values import PARTS_PER_WHOLE, Homes, Instance, Limits, Shares
from trimtab.planner.replicas.replica_search import place_replicas
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.planner.replicas.split import split_tokens


def plan_layer(counts_MLRE: Array, fixed_MR: Array, layer: int, home_E: Array, limits: Limits) -> ReplicaTable:
    """Replicas and split for every micro-step of a layer. Instances don't depend on each other.

    Args:
        counts_MLRE: `[M, L, R, E]` int32, known rows; only `layer` is read.
        fixed_MR: `[M, R]` int64, expected rows of unknown routes in the layer, which stay at their home rank.
        home_E: `[E]` int16 homes of the layer's experts.
        limits: `threshold_parts` refers to known and expected rows.

    Returns:
        A table of M instances.
    """
    homes = Homes.of(home_E, counts_MLRE.shape[2])
    starts, experts, ranks, tokens = _place_layer(counts_MLRE, np.ascontiguousarray(fixed_MR), layer, homes, limits)
    return _split(counts_MLRE, layer, home_E, limits.ranks_per_node, starts, Shares(experts, ranks, tokens))


def split_layer(
    counts_MLRE: Array, layer: int, home_E: Array, ranks_per_node: int, replicas: ReplicaTable
) -> ReplicaTable:
    """Returns the same replicas and shares of M micro-steps, split for these counts.

    Args:
        counts_MLRE, layer, home_E: as in `plan_layer`.
    """
    return _split(counts_MLRE, layer, home_E, ranks_per_node, replicas.replica_starts, replicas.shares)


def _split(
    counts_MLRE: Array, layer: int, home_E: Array, ranks_per_node: int, starts: Array, shares: Shares
) -> ReplicaTable:
    quota_starts, sources, tokens = _split_layer(counts_MLRE, layer, home_E, ranks_per_node, starts, shares)
    experts, ranks = shares.experts.astype(np.int16), shares.ranks.astype(np.int16)
    return ReplicaTable(starts, experts, ranks, quota_starts, sources, tokens)


@kernel
def _place_layer(counts_MLRE, fixed_MR, layer, homes, limits):  # type: ignore[no-untyped-def]
    num_micro_steps, _, num_ranks, num_experts = counts_MLRE.shape
    most = num_ranks * limits.slots
    counts_E = np.empty(num_experts, np.int64)
    starts = np.zeros(num_micro_steps + 1, np.int64)
    experts = np.empty(num_micro_steps * most, np.int64)
    ranks = np.empty(num_micro_steps * most, np.int64)
    tokens = np.empty(num_micro_steps * most, np.int64)
    replica = 0
    for m in range(num_micro_steps):
        for e in range(num_experts):
            counts_E[e] = 0
        rows = np.int64(0)
        for r in range(num_ranks):
            rows += fixed_MR[m, r]
            for e in range(num_experts):
                counts_E[e] += counts_MLRE[m, layer, r, e]
        for e in range(num_experts):
            rows += counts_E[e]
        threshold_load = rows * limits.threshold_parts // (num_ranks * PARTS_PER_WHOLE)
        found, count = place_replicas(Instance(counts_E, fixed_MR[m], homes), limits, threshold_load)
        for p in range(count):
            experts[replica] = found.experts[p]
            ranks[replica] = found.ranks[p]
            tokens[replica] = found.tokens[p]
            replica += 1
        starts[m + 1] = replica
    # Copies, so that unused memory is freed.
    return starts, experts[:replica].copy(), ranks[:replica].copy(), tokens[:replica].copy()


@kernel
def _split_layer(counts_MLRE, layer, home_E, ranks_per_node, starts, shares):  # type: ignore[no-untyped-def]
    num_ranks = counts_MLRE.shape[2]
    num_replicas = len(shares.experts)
    most = 0
    for m in range(len(starts) - 1):
        most = max(most, starts[m + 1] - starts[m])
    quotas_PR = np.empty((most, num_ranks), np.int64)
    quota_starts = np.zeros(num_replicas + 1, np.int64)
    sources = np.empty(num_replicas * num_ranks, np.int16)
    tokens = np.empty(num_replicas * num_ranks, np.int32)
    quota = 0
    for m in range(len(starts) - 1):
        first, end = starts[m], starts[m + 1]
        mine = Shares(shares.experts[first:end], shares.ranks[first:end], shares.tokens[first:end])
        split_tokens(counts_MLRE[m, layer], home_E, ranks_per_node, mine, quotas_PR)
        for p in range(first, end):
            for r in range(num_ranks):
                if quotas_PR[p - first, r] > 0:
                    sources[quota] = r
                    tokens[quota] = quotas_PR[p - first, r]
                    quota += 1
            quota_starts[p + 1] = quota
    return quota_starts, sources[:quota].copy(), tokens[:quota].copy()
