"""Replicas of one instance from its counts, in integers: the same on all ranks that have the same counts.

* `choose_quotas`: Trimtab's own replicas and split, as for a planned instance.
* `choose_moves`: FEPLB's whole experts (arXiv 2604.19654), within a node.
* `split_over`: the split over replicas that were chosen before the router.
"""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.replicas.instance_choice import choose_replicas, split_over_replicas
from trimtab.planner.replicas.kernel_values import Limits
from trimtab.planner.replicas.whole_experts import InstanceLoad, choose_whole_experts
from trimtab.runtime.rows.physical_experts import InstanceReplicas


def choose_quotas(counts_RE: Array, home_E: Array, limits: Limits) -> InstanceReplicas:
    """Replicas and quotas of an instance.

    Args:
        counts_RE: `[R, E]` int64 rows by source rank and expert.
        home_E: `[E]` int16.
    """
    return InstanceReplicas.chosen(*choose_replicas(counts_RE, home_E, limits))


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
    quotas_PR = split_over_replicas(experts_P, ranks_P, counts_RE, home_E, limits)
    return InstanceReplicas.chosen(experts_P, ranks_P, quotas_PR)
