"""Time of an instance under a choice of replicas, in the units of `Prices`."""

from __future__ import annotations

import numpy as np

from trimtab.kernels import kernel


@kernel
def cost_of_replicas(instance, sources, limits, shares, count):  # type: ignore[no-untyped-def]
    """Time of the busiest rank's rows, of the busiest link's, and of the replicas, int64 femtoseconds; and the busiest
    rank's rows.

    A node's copies compute its own tokens first, so an expert's tokens leave the node only beyond what they compute.

    Args:
        instance: an `InstanceRows`.
        sources: `[N, E]` int64 tokens by source node and expert, and `[N]` int64 their sums over experts; not read if
            rows between nodes have no price.
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
    busiest = _busiest_node(sources, home_E, at_home_E, shares, count, ranks_per_node)
    # A rank's rows all cross a link inside its node, but for its own.
    return cost + max(prices.far_row * busiest, prices.near_row * (rows // len(loads_R))), highest


@kernel
def _busiest_node(sources, home_E, at_home_E, shares, count, ranks_per_node):  # type: ignore[no-untyped-def]
    """Rows that leave the busiest node or arrive there.

    Of an expert only the nodes with a copy are read, so that the time does not grow with the number of nodes.
    """
    counts_NE, rows_N = sources
    experts_P, ranks_P, tokens_P = shares
    num_nodes, num_experts = counts_NE.shape
    leaving_N, arriving_N = rows_N.copy(), np.zeros(num_nodes, np.int64)
    # Replicas of one expert form a chain.
    last_E, before_P = np.full(num_experts, np.int64(-1)), np.empty(count, np.int64)
    for p in range(count):
        before_P[p] = last_E[experts_P[p]]
        last_E[experts_P[p]] = p
    # Of an expert, what the copies on each node compute.
    computed_N = np.zeros(num_nodes, np.int64)
    for e in range(num_experts):
        node = home_E[e] // ranks_per_node
        computed_N[node] = at_home_E[e]
        p = last_E[e]
        while p >= 0:
            computed_N[ranks_P[p] // ranks_per_node] += tokens_P[p]
            p = before_P[p]
        p = last_E[e]
        while True:
            own, computed = counts_NE[node, e], computed_N[node]
            leaving_N[node] -= min(own, computed)
            arriving_N[node] += max(computed - own, np.int64(0))
            computed_N[node] = 0
            if p < 0:
                break
            node = ranks_P[p] // ranks_per_node
            p = before_P[p]
    busiest = np.int64(0)
    for n in range(num_nodes):
        busiest = max(busiest, leaving_N[n], arriving_N[n])
    return busiest
