"""Replicas in the nodes whose tokens use the expert, so that fewer rows leave a node, with even loads.

Copies go to nodes of foreign experts that most of their own tokens use. Each copy computes these tokens, on the rank of
the node with the lowest load. Then tokens are shifted between copies until ranks are even (`shift_shares`). (Our own.
LAER-MoE, arXiv 2602.11686, also copies the hottest experts to every node, from past loads and with equal shares.)
"""

from __future__ import annotations

import numpy as np

from trimtab.kernels import kernel
from trimtab.planner.replicas.kernel_values import Placing, empty_shares

# int64, because numba compiles a kernel once more for every Python int.
SWEEPS = np.int64(8)


@kernel
def place_local_replicas(instance, counts_NE, limits, target):  # type: ignore[no-untyped-def]
    """Replicas that keep rows in their node, with loads up to the target where shifts can reach it.

    Of all experts and nodes without one, those whose tokens are the most come first.

    Args:
        instance: an `InstanceRows`.
        counts_NE: `[N, E]` int64 tokens by source node and expert.
        limits: `Limits`.
        target: load that no rank should exceed, rows.

    Returns:
        `Shares` of `R * slots` replicas, and the number of replicas.
    """
    counts_E, fixed_R, homes = instance
    home_E, per_node, prices = homes.home_E, np.int64(limits.ranks_per_node), limits.prices
    (num_nodes, num_experts), num_ranks = counts_NE.shape, len(fixed_R)
    found = empty_shares(num_ranks * limits.slots)
    experts_P, ranks_P, tokens_P = found
    loads_R, at_home_E = fixed_R.copy(), counts_E.copy()
    wanted_X = np.empty(num_nodes * num_experts, np.int64)
    for e in range(num_experts):
        loads_R[home_E[e]] += counts_E[e]
        for n in range(num_nodes):
            wanted_X[n * num_experts + e] = counts_NE[n, e] if home_E[e] // per_node != n else 0
    # A replica has to save its transfer in rows between nodes, if every node has one more.
    least = max(np.int64(limits.smallest_share), num_nodes * prices.far_replica // max(prices.far_row, np.int64(1)))
    room_N, sent_R, count = np.full(num_nodes, per_node * limits.slots), np.zeros(num_ranks, np.int64), np.int64(0)
    for x in np.argsort(-wanted_X, kind="mergesort"):
        if wanted_X[x] < least:
            break
        node, expert = x // num_experts, x % num_experts
        home, tokens = home_E[expert], min(wanted_X[x], at_home_E[expert] - limits.smallest_share)
        if room_N[node] == 0 or sent_R[home] >= limits.sends or tokens < least:
            continue
        room_N[node] -= 1
        sent_R[home] += 1
        experts_P[count], ranks_P[count], tokens_P[count] = expert, node, tokens
        at_home_E[expert] -= tokens
        loads_R[home] -= tokens
        count += 1
    free_R = np.full(num_ranks, np.int64(limits.slots))
    for p in range(count):
        taker, first = np.int64(-1), ranks_P[p] * per_node
        for r in range(first, first + per_node):
            if free_R[r] > 0 and (taker < 0 or loads_R[r] < loads_R[taker]):
                taker = np.int64(r)
        ranks_P[p] = taker
        free_R[taker] -= 1
        loads_R[taker] += tokens_P[p]
    shift_shares(Placing(counts_NE, loads_R, at_home_E, found), count, home_E, limits, target, SWEEPS)
    return found, count


@kernel
def shift_shares(placing, count, home_E, limits, target, sweeps):  # type: ignore[no-untyped-def]
    """Shift tokens between an expert's home and its replicas until no rank is above the target, in at most `sweeps`
    sweeps over all replicas, with few rows more between nodes.

    A copy computes the tokens of its node first. Tokens beyond those come from other nodes in any case, so they are
    shifted freely; a node's own leave it only as far as a rank is above the target.

    Args:
        placing: a `Placing`; loads, tokens at home and shares are changed.
        count: replicas.
        home_E: `[E]` int16.
        limits: `Limits`.
        target: load that no rank should exceed, rows.
    """
    counts_NE, loads_R, at_home_E, (experts_P, ranks_P, tokens_P) = placing
    ranks_per_node, smallest = np.int64(limits.ranks_per_node), limits.smallest_share
    # Looked up rather than divided.
    node_R = np.empty(len(loads_R), np.int64)
    for node in range(len(loads_R) // ranks_per_node):
        for r in range(node * ranks_per_node, (node + 1) * ranks_per_node):
            node_R[r] = node
    for _ in range(sweeps):
        highest = np.int64(0)
        for r in range(len(loads_R)):
            highest = max(highest, loads_R[r])
        if highest <= target:
            return
        is_changed = False
        for p in range(count):
            expert, rank = experts_P[p], ranks_P[p]
            home = np.int64(home_E[expert])
            gap = loads_R[home] - loads_R[rank]
            giver_load = max(loads_R[home], loads_R[rank])
            tokens = at_home_E[expert] if gap > 0 else tokens_P[p]
            most = tokens - smallest
            half = abs(gap) // 2
            if half == 0 or most <= 0:
                continue
            node, home_node = node_R[rank], node_R[home]
            if node == home_node:
                moved = min(half, most)
            else:
                own = counts_NE[home_node if gap > 0 else node, expert]
                moved = max(min(half, tokens - own, most), np.int64(0))
                more = min(giver_load - moved - target, half - moved)
                if more > 0:
                    moved = min(moved + more, max(most, moved))
            # A home without tokens gets a whole share or none.
            if moved <= 0 or (gap < 0 and at_home_E[expert] == 0 and moved < smallest):
                continue
            if gap < 0:
                moved = -moved
            at_home_E[expert] -= moved
            tokens_P[p] += moved
            loads_R[home] -= moved
            loads_R[rank] += moved
            is_changed = True
        if not is_changed:
            return
