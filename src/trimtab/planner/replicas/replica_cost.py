"""Time of an instance under a choice of replicas, in the units of `Prices`."""

from __future__ import annotations

import numpy as np

from trimtab.kernels import kernel


@kernel
def cost_of_replicas(instance, counts_NE, limits, shares, count):  # type: ignore[no-untyped-def]
    """Time of the busiest rank's rows, of the busiest link's, and of the replicas, int64 femtoseconds; and the busiest
    rank's rows.

    A node's copies compute its own tokens first, so an expert's tokens leave the node only beyond what they compute.

    Args:
        instance: an `InstanceRows`.
        counts_NE: `[N, E]` int64 tokens by source node and expert; not read if rows between nodes have no price.
        limits: `Limits`.
        shares: `Shares`, of which the first `count` count.
    """
    counts_E, fixed_R, (home_E, _, _) = instance
    experts_P, ranks_P, tokens_P = shares
    ranks_per_node, prices = np.int64(limits.ranks_per_node), limits.prices
    loads_R, at_home_E = fixed_R.copy(), counts_E.copy()
    cost = np.int64(0)
    for p in range(count):
        at_home_E[experts_P[p]] -= tokens_P[p]
        loads_R[ranks_P[p]] += tokens_P[p]
        is_far = ranks_P[p] // ranks_per_node != home_E[experts_P[p]] // ranks_per_node
        cost += prices.far_replica if is_far else prices.near_replica
    rows, highest = np.int64(0), np.int64(0)
    for e in range(len(counts_E)):
        loads_R[home_E[e]] += at_home_E[e]
    for r in range(len(loads_R)):
        rows += loads_R[r]
        highest = max(highest, loads_R[r])
    cost += prices.computed_row * highest
    if prices.far_row == 0:
        return cost + prices.near_row * (rows // len(loads_R)), highest
    # Tokens that each node's copies compute less those that its ranks have.
    num_nodes, num_experts = counts_NE.shape
    beyond_NE = -counts_NE
    for p in range(count):
        beyond_NE[ranks_P[p] // ranks_per_node, experts_P[p]] += tokens_P[p]
    for e in range(num_experts):
        beyond_NE[home_E[e] // ranks_per_node, e] += at_home_E[e]
    busiest = np.int64(0)
    for n in range(num_nodes):
        leaving, arriving = np.int64(0), np.int64(0)
        for e in range(num_experts):
            leaving += max(-beyond_NE[n, e], np.int64(0))
            arriving += max(beyond_NE[n, e], np.int64(0))
        busiest = max(busiest, leaving, arriving)
    # A rank's rows all cross a link inside its node, but for its own.
    return cost + max(prices.far_row * busiest, prices.near_row * (rows // len(loads_R))), highest
