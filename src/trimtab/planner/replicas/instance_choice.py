"""Replicas and split of one instance from its counts, in integers: the same wherever the counts are the same."""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.replicas.kernel_values import Homes, InstanceRows, Limits, Shares
from trimtab.planner.replicas.layer_plan import plan_layer
from trimtab.planner.replicas.replica_search import level_shares
from trimtab.planner.replicas.split import Quotas, split_tokens

# Tries to level shares; each has four sweeps over the replicas.
LEVELINGS = 2


def choose_replicas(counts_RE: Array, home_E: Array, limits: Limits) -> tuple[Array, Array, Array]:
    """Replicas of an instance, and their quotas.

    Args:
        counts_RE: `[R, E]` int64 rows by source rank and expert.
        home_E: `[E]` int16.

    Returns:
        Experts `[P]` and ranks `[P]`, and quotas `[P, R]` int64 by source rank.
    """
    num_ranks = len(counts_RE)
    counts_MLRE = np.ascontiguousarray(counts_RE, np.int32)[None, None]
    table = plan_layer(counts_MLRE, np.zeros((1, num_ranks), np.int64), 0, home_E, limits)
    quotas_PR = np.zeros((len(table.ranks), num_ranks), np.int64)
    replica_Q = np.repeat(np.arange(len(table.ranks)), np.diff(table.quota_starts))
    quotas_PR[replica_Q, table.sources] = table.tokens
    return table.experts, table.ranks, quotas_PR


def split_over_replicas(experts_P: Array, ranks_P: Array, counts_RE: Array, home_E: Array, limits: Limits) -> Array:
    """Quotas `[P, R]` int64 of given replicas, with shares that level the loads of their ranks and homes.

    Args:
        experts_P, ranks_P: `[P]` int64, ordered by expert.
        counts_RE, home_E: as in `choose_replicas`.
    """
    counts_E, num_ranks = counts_RE.sum(axis=0), len(counts_RE)
    instance = InstanceRows(counts_E, np.zeros(num_ranks, np.int64), Homes.of(home_E, num_ranks))
    shares = Shares(experts_P.astype(np.int64), ranks_P.astype(np.int64), np.zeros(len(experts_P), np.int64))
    for _ in range(LEVELINGS):
        loads_R = np.bincount(home_E, counts_E, num_ranks).astype(np.int64)
        level_shares(instance, loads_R, np.int64(0), shares, len(experts_P))
    most = len(experts_P) * num_ranks
    quotas = Quotas(np.zeros(len(experts_P) + 1, np.int64), np.empty(most, np.int16), np.empty(most, np.int32))
    counts = np.ascontiguousarray(counts_RE, np.int32)
    split_tokens(counts, counts_E, instance.homes.home_E, np.int64(limits.ranks_per_node), shares, quotas)
    quotas_PR = np.zeros((len(experts_P), num_ranks), np.int64)
    end = quotas.starts[-1]
    replica_Q = np.repeat(np.arange(len(experts_P)), np.diff(quotas.starts))
    quotas_PR[replica_Q, quotas.sources[:end]] = quotas.tokens[:end]
    return quotas_PR
