"""Row counts: the rows that ranks compute under a plan, and those sent between nodes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner.replicas.replica_table import ReplicaTable


class RowCounts(NamedTuple):
    """Rows of every instance of M micro-steps and L layers.

    Attributes:
        loads_MLR: `[M, L, R]` int64, by the rank that computes them.
        between_MLNN: `[M, L, N, N]` int64, by the nodes that they come from and go to.
    """

    loads_MLR: Array
    between_MLNN: Array


def count_rows(
    counts_MLRE: Array, first_layer: int, home_LE: Array, replicas: ReplicaTable, ranks_per_node: int
) -> RowCounts:
    """Count the rows of some layers under a plan.

    Args:
        counts_MLRE: `[M, >= first_layer + L, R, E]` int32 rows by source rank and expert.
        home_LE: `[L, E]` int16, homes of layers `first_layer` to `first_layer + L - 1`.
        replicas: of M * L instances, those of a micro-step next to each other.
    """
    shape, num_ranks = (len(counts_MLRE), len(home_LE)), counts_MLRE.shape[2]
    nodes = num_ranks // ranks_per_node
    rows = RowCounts(np.zeros((*shape, num_ranks), np.int64), np.zeros((*shape, nodes, nodes), np.int64))
    _count_rows(counts_MLRE, first_layer, home_LE, replicas, ranks_per_node, rows)
    return rows


def add_replicas(loads_MLR: Array, home_LE: Array, replicas: ReplicaTable) -> Array:
    """Rows `[M, L, R]` int64 of every rank with replicas, from those without; arguments as in `count_rows`."""
    instances_P, (experts_P, ranks_P, tokens_P) = replicas.instances_P, replicas.shares
    moved_IR = loads_MLR.reshape(-1, loads_MLR.shape[2]).copy()
    np.subtract.at(moved_IR, (instances_P, home_LE[instances_P % len(home_LE), experts_P]), tokens_P)
    np.add.at(moved_IR, (instances_P, ranks_P), tokens_P)
    return moved_IR.reshape(loads_MLR.shape)


@kernel
def _count_rows(counts_MLRE, first_layer, home_LE, replicas, ranks_per_node, rows):  # type: ignore[no-untyped-def]
    replica_starts, experts_P, ranks_P, quota_starts, sources_Q, tokens_Q = replicas
    loads_MLR, between_MLNN = rows
    num_micro_steps, num_layers, num_ranks = loads_MLR.shape
    for m in range(num_micro_steps):
        for i in range(num_layers):
            home_E, loads_R, between_NN = home_LE[i], loads_MLR[m, i], between_MLNN[m, i]
            for source in range(num_ranks):
                node = source // ranks_per_node
                for e in range(len(home_E)):
                    tokens = counts_MLRE[m, first_layer + i, source, e]
                    loads_R[home_E[e]] += tokens
                    between_NN[node, home_E[e] // ranks_per_node] += tokens
            instance = m * num_layers + i
            for p in range(replica_starts[instance], replica_starts[instance + 1]):
                home, rank = home_E[experts_P[p]], ranks_P[p]
                for q in range(quota_starts[p], quota_starts[p + 1]):
                    tokens, node = tokens_Q[q], sources_Q[q] // ranks_per_node
                    loads_R[home] -= tokens
                    loads_R[rank] += tokens
                    between_NN[node, home // ranks_per_node] -= tokens
                    between_NN[node, rank // ranks_per_node] += tokens
