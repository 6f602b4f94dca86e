"""Replicas of one instance from its counts, in integers: the same on all ranks that have the same counts.

* `choose_quotas`: Trimtab's own replicas and split, as for a planned instance.
* `choose_moves`: FEPLB's whole experts (arXiv 2604.19654), within a node.
* `split_over`: the split over replicas that were chosen before the router.
"""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.replicas.kernel_values import Homes, InstanceRows, Limits, Shares
from trimtab.planner.replicas.layer_plan import plan_layer
from trimtab.planner.replicas.leveling import level_shares
from trimtab.planner.replicas.split import Quotas, split_tokens
from trimtab.planner.replicas.whole_experts import InstanceLoad, choose_whole_experts
from trimtab.runtime.rows.physical_experts import InstanceReplicas

# Tries to level shares; each has four sweeps over the replicas.
LEVELINGS = 2


def choose_quotas(counts_RE: Array, home_E: Array, limits: Limits) -> InstanceReplicas:
    """Replicas and quotas of an instance.

    Args:
        counts_RE: `[R, E]` int64 rows by source rank and expert.
        home_E: `[E]` int16.
    """
    num_ranks = len(counts_RE)
    counts_MLRE = np.ascontiguousarray(counts_RE, np.int32)[None, None]
    table = plan_layer(counts_MLRE, np.zeros((1, num_ranks), np.int64), 0, home_E, limits)
    quotas_PR = np.zeros((len(table.ranks), num_ranks), np.int64)
    replica_Q = np.repeat(np.arange(len(table.ranks)), np.diff(table.quota_starts))
    quotas_PR[replica_Q, table.sources] = table.tokens
    return InstanceReplicas.chosen(table.experts, table.ranks, quotas_PR)


def choose_moves(
    counts_RE: Array, home_E: Array, rows_E: Array, dynamic_E: Array, limits: Limits, *, smallest_move: int = 1
) -> InstanceReplicas:
    """Whole experts that move to less loaded ranks of their node, with all their rows.

    Args:
        counts_RE, home_E: as in `choose_quotas`.
        rows_E: `[E]` int64, the row of each expert on its home rank.
        dynamic_E: `[E]` bool, the experts that may move.
        smallest_move: fewest rows of an expert that moves.

    Returns:
        Replicas ordered by rank, home and row: the order in which rows arrive in the second phase.
    """
    counts_E, num_ranks = counts_RE.sum(axis=0), len(counts_RE)
    homes = home_E.astype(np.int64)
    loads_R = np.bincount(homes, counts_E, num_ranks).astype(np.int64)
    load = InstanceLoad(counts_E, homes, loads_R, limits.ranks_per_node, limits.ranks_per_node, limits.slots)
    moves_P2 = np.empty((num_ranks * limits.slots, 2), np.int64)
    count = choose_whole_experts(load, dynamic_E & (counts_E >= max(smallest_move, 1)), moves_P2)
    experts, ranks = moves_P2[:count].T
    in_order = np.lexsort((rows_E[experts], homes[experts], ranks))
    experts, ranks = experts[in_order], ranks[in_order]
    return InstanceReplicas.chosen(experts, ranks, counts_RE.T[experts].astype(np.int64))


def split_over(experts_P: Array, ranks_P: Array, counts_RE: Array, home_E: Array, limits: Limits) -> InstanceReplicas:
    """Given replicas, with shares that level the loads of their ranks and homes.

    Args:
        experts_P, ranks_P: `[P]` int64, ordered by expert.
        counts_RE, home_E: as in `choose_quotas`.
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
    split_tokens(counts, counts_E, instance.homes.home_E, np.int64(limits.ranks_per_node), shares, quotas, np.int64(0))
    quotas_PR = np.zeros((len(experts_P), num_ranks), np.int64)
    end = quotas.starts[-1]
    replica_Q = np.repeat(np.arange(len(experts_P)), np.diff(quotas.starts))
    quotas_PR[replica_Q, quotas.sources[:end]] = quotas.tokens[:end]
    return InstanceReplicas.chosen(experts_P, ranks_P, quotas_PR)
