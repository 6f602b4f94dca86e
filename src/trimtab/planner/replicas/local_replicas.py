"""Replicas in the nodes whose tokens use the expert, so that fewer rows leave a node, with even loads.

Every node first gets copies of the foreign experts that most of its own tokens use. Each copy computes these tokens, on
the rank of the node with the lowest load. Then tokens are shifted between copies until ranks are even
(`shift_shares`), and where that is not enough, copies are exchanged (`exchanges.py`). (Our own. LAER-MoE, arXiv
2602.11686, also copies the hottest experts to every node, from past loads and with equal shares.)
"""

from __future__ import annotations

import numpy as np

from trimtab.kernels import kernel
from trimtab.planner.replicas.exchanges import exchange_replicas
from trimtab.planner.replicas.kernel_values import Placing, Shares

# int64, because numba compiles a kernel once more for every Python int.
SWEEPS, SWEEPS_AFTER_EXCHANGE = np.int64(8), np.int64(4)
# Rounds of exchanges, in each of which every overloaded rank gives away part of one expert.
ROUNDS = 8
NEVER = np.int64(1) << 62


@kernel
def place_local_replicas(instance, sources, limits, target):  # type: ignore[no-untyped-def]
    """Replicas that keep rows in their node, with loads up to the target where that is possible.

    Args:
        instance: an `InstanceRows`.
        sources: `[N, E]` int64 tokens by source node and expert, and `[N]` int64 their sums over experts.
        limits: `Limits`.
        target: load that no rank should exceed, rows.

    Returns:
        `Shares` of at least `R * slots` replicas, and the number of replicas.
    """
    homes = instance.homes
    most = len(instance.fixed_R) * limits.slots
    best = Shares(np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64))
    placing, count = _start(instance, sources[0], limits, best, np.int64(0))
    count = _copy_to_nodes(placing, count, homes.home_E, limits)
    shift_shares(placing, count, homes.home_E, limits, target, SWEEPS)
    gave_up_R = np.zeros(len(instance.fixed_R), np.bool_)
    cost, best_count = np.int64(1) << 62, np.int64(0)
    for _ in range(ROUNDS + 1):
        found, _ = cost_of_replicas(instance, sources, limits, placing.found, count)
        if found < cost:
            cost, best_count = found, count
            _copy_shares(placing.found, best, count)
        count, exchanges = exchange_replicas(placing, count, homes, limits, target, gave_up_R)
        if exchanges == 0:
            break
        shift_shares(placing, count, homes.home_E, limits, target, SWEEPS_AFTER_EXCHANGE)
    return best, best_count


@kernel
def fill_free_slots(instance, sources, limits, target, shares, count):  # type: ignore[no-untyped-def]
    """The given replicas, and local ones in the slots that they leave free.

    Args:
        instance, sources, limits, target: as in `place_local_replicas`.
        shares: `Shares`, of which the first `count` count.

    Returns:
        As `place_local_replicas`.
    """
    placing, count = _start(instance, sources[0], limits, shares, count)
    count = _copy_to_nodes(placing, count, instance.homes.home_E, limits)
    shift_shares(placing, count, instance.homes.home_E, limits, target, SWEEPS)
    return placing.found, count


@kernel
def _start(instance, counts_NE, limits, shares, count):  # type: ignore[no-untyped-def]
    """The state with the given replicas, and their number."""
    counts_E, fixed_R, homes = instance
    num_ranks = len(fixed_R)
    most = num_ranks * limits.slots
    placing = Placing(
        counts_NE,
        fixed_R.copy(),
        counts_E.copy(),
        np.full(num_ranks, limits.slots, np.int64),
        Shares(np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)),
    )
    _copy_shares(shares, placing.found, count)
    for p in range(count):
        placing.at_home_E[shares.experts[p]] -= shares.tokens[p]
        placing.loads_R[shares.ranks[p]] += shares.tokens[p]
        placing.free_slots_R[shares.ranks[p]] -= 1
    for e in range(len(counts_E)):
        placing.loads_R[homes.home_E[e]] += placing.at_home_E[e]
    return placing, count


@kernel
def _copy_shares(source, target, count):  # type: ignore[no-untyped-def]
    for p in range(count):
        target.experts[p], target.ranks[p], target.tokens[p] = source.experts[p], source.ranks[p], source.tokens[p]


@kernel
def _copy_to_nodes(placing, count, home_E, limits):  # type: ignore[no-untyped-def]
    """Copy to every node, in its free slots, the experts without a copy there that most of its tokens use.

    Args:
        count: replicas so far.

    Returns:
        The number of replicas.
    """
    counts_NE, loads_R, at_home_E, free_slots_R, (experts_P, ranks_P, tokens_P) = placing
    ranks_per_node, prices = np.int64(limits.ranks_per_node), limits.prices
    num_nodes, num_experts = counts_NE.shape
    # A replica has to save its transfer in rows between nodes, if every node has one more.
    least = max(np.int64(limits.smallest_share), num_nodes * prices.far_replica // max(prices.far_row, np.int64(1)))
    has_copy_NE = np.zeros((num_nodes, num_experts), np.bool_)
    for e in range(num_experts):
        has_copy_NE[home_E[e] // ranks_per_node, e] = True
    for p in range(count):
        has_copy_NE[ranks_P[p] // ranks_per_node, experts_P[p]] = True
    first_N = np.full(num_nodes + 1, count)
    for n in range(num_nodes):
        room = np.int64(0)
        for r in range(n * ranks_per_node, (n + 1) * ranks_per_node):
            room += free_slots_R[r]
        first = first_N[n]
        end = first
        # Fewest tokens for which an expert gets a copy; more once the node is full.
        fewest = least if room > 0 else NEVER
        for e in range(num_experts):
            if counts_NE[n, e] < fewest or has_copy_NE[n, e]:
                continue
            tokens = min(counts_NE[n, e], at_home_E[e] - limits.smallest_share)
            if tokens < fewest:
                continue
            if end < first + room:
                end += 1
            # Sorted by tokens; the last one drops out if the node is full.
            p = end - 1
            while p > first and tokens_P[p - 1] < tokens:
                experts_P[p], tokens_P[p] = experts_P[p - 1], tokens_P[p - 1]
                p -= 1
            experts_P[p], tokens_P[p] = e, tokens
            if end == first + room:
                fewest = tokens_P[end - 1] + 1
        for p in range(first, end):
            at_home_E[experts_P[p]] -= tokens_P[p]
            loads_R[home_E[experts_P[p]]] -= tokens_P[p]
        first_N[n + 1] = end
    for n in range(num_nodes):
        for p in range(first_N[n], first_N[n + 1]):
            taker = np.int64(-1)
            for r in range(n * ranks_per_node, (n + 1) * ranks_per_node):
                if free_slots_R[r] > 0 and (taker < 0 or loads_R[r] < loads_R[taker]):
                    taker = np.int64(r)
            ranks_P[p] = taker
            free_slots_R[taker] -= 1
            loads_R[taker] += tokens_P[p]
    return first_N[num_nodes]


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
    counts_NE, loads_R, at_home_E, _, (experts_P, ranks_P, tokens_P) = placing
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
