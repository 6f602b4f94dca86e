"""Row counts of a plan: the rows that ranks compute, and those sent between nodes."""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel


@kernel
def tally(  # type: ignore[no-untyped-def]
    counts_MLRE, home_LE, replica_starts, experts_P, ranks_P, quota_starts, sources_Q, tokens_Q, ranks_per_node,
    loads_MLR, between_MLNN,
):  # fmt: skip
    """Count rows by the rank that computes them, and by the nodes that they come from and go to.

    Args:
        counts_MLRE, home_LE: tokens by source and expert, and homes.
        replica_starts, experts_P, ranks_P, quota_starts, sources_Q, tokens_Q: as in `StepPlan`.
        loads_MLR: `[M, L, R]` int64, filled.
        between_MLNN: `[M, L, N, N]` int64, from node to node, filled.
    """
    num_micro_steps, num_layers, num_ranks, num_experts = counts_MLRE.shape
    for m in range(num_micro_steps):
        for layer in range(num_layers):
            home_E, loads_R, between_NN = home_LE[layer], loads_MLR[m, layer], between_MLNN[m, layer]
            loads_R[:] = 0
            between_NN[:] = 0
            for source in range(num_ranks):
                node = source // ranks_per_node
                for e in range(num_experts):
                    tokens = counts_MLRE[m, layer, source, e]
                    loads_R[home_E[e]] += tokens
                    between_NN[node, home_E[e] // ranks_per_node] += tokens
            instance = m * num_layers + layer
            for p in range(replica_starts[instance], replica_starts[instance + 1]):
                home, rank = home_E[experts_P[p]], ranks_P[p]
                for q in range(quota_starts[p], quota_starts[p + 1]):
                    tokens, node = tokens_Q[q], sources_Q[q] // ranks_per_node
                    loads_R[home] -= tokens
                    loads_R[rank] += tokens
                    between_NN[node, home // ranks_per_node] -= tokens
                    between_NN[node, rank // ranks_per_node] += tokens


def empty_rows(num_micro_steps: int, num_layers: int, num_ranks: int, ranks_per_node: int) -> tuple[Array, Array]:
    """Empty arrays for `tally` to fill."""
    nodes, shape = num_ranks // ranks_per_node, (num_micro_steps, num_layers)
    return np.empty((*shape, num_ranks), np.int64), np.empty((*shape, nodes, nodes), np.int64)
