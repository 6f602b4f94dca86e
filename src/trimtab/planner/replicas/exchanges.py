"""Exchanges: an overloaded rank's largest expert gets another copy, in place of the replica that is missed least.

Used where shifting tokens between the copies of an expert is not enough, because a middle-sized expert has too few.
"""

from __future__ import annotations

import numpy as np

from trimtab.kernels import kernel

WORST = -(np.int64(1) << 60)
# Most ranks that give in one round, so that a round takes little time with many ranks.
MOST_GIVERS = 64


@kernel
def exchange_replicas(placing, count, homes, limits, target, gave_up_R):  # type: ignore[no-untyped-def]
    """One round: the ranks above the target, most loaded first, give part of their largest expert to a new copy.

    Args:
        placing: a `Placing`; changed.
        count: replicas.
        homes: `Homes`.
        limits: `Limits`.
        target: load that no rank should exceed, rows.
        gave_up_R: `[R]` bool, ranks without a possible exchange; updated.

    Returns:
        The number of replicas, and of exchanges.
    """
    counts_NE, loads_R, at_home_E, free_slots_R, (experts_P, ranks_P, tokens_P) = placing
    home_E, experts_by_home, starts_R = homes
    ranks_per_node, smallest = np.int64(limits.ranks_per_node), limits.smallest_share
    num_ranks = len(loads_R)
    has_copy_R = np.zeros(num_ranks, np.bool_)
    has_copy_N = np.zeros(num_ranks // ranks_per_node, np.bool_)
    overloaded = np.empty(num_ranks, np.int64)
    number = 0
    for r in range(num_ranks):
        if loads_R[r] <= target or gave_up_R[r]:
            continue
        i = number
        while i > 0 and loads_R[overloaded[i - 1]] < loads_R[r]:
            overloaded[i] = overloaded[i - 1]
            i -= 1
        overloaded[i] = r
        number += 1
    exchanges = np.int64(0)
    for giver in overloaded[: min(number, MOST_GIVERS)]:
        excess = loads_R[giver] - target
        if excess <= 0:
            continue
        expert, largest = np.int64(-1), np.int64(0)
        for i in range(starts_R[giver], starts_R[giver + 1]):
            if at_home_E[experts_by_home[i]] > largest:
                expert, largest = experts_by_home[i], at_home_E[experts_by_home[i]]
        if largest < 2 * smallest:
            gave_up_R[giver] = True
            continue
        home_node = giver // ranks_per_node
        has_copy_R[:] = False
        has_copy_N[:] = False
        has_copy_R[giver] = True
        for p in range(count):
            if experts_P[p] == expert:
                has_copy_R[ranks_P[p]] = True
                has_copy_N[ranks_P[p] // ranks_per_node] = True
        # In the own node a second copy saves no rows between nodes; in a node with a copy it would not either.
        has_copy_N[home_node] = False
        movable = largest - smallest
        # The new copy takes the place of replica `place`, or a free slot of `taker` if that is `count`.
        best, place, taker = WORST, np.int64(-1), np.int64(-1)
        for r in range(num_ranks):
            node = r // ranks_per_node
            if free_slots_R[r] == 0 or has_copy_R[r] or has_copy_N[node] or loads_R[r] + smallest > target:
                continue
            saved = np.int64(0) if node == home_node else min(counts_NE[node, expert], movable)
            if node != home_node and saved < smallest:
                continue
            if saved > best or (saved == best and loads_R[r] < loads_R[taker]):
                best, place, taker = saved, np.int64(count), np.int64(r)
        for p in range(count):
            rank, other = ranks_P[p], experts_P[p]
            node, other_home = rank // ranks_per_node, np.int64(home_E[other])
            if has_copy_R[rank] or has_copy_N[node] or loads_R[rank] - tokens_P[p] + smallest > target:
                continue
            # The other expert's tokens return to its home, which should not become the new problem.
            if other_home == rank or loads_R[other_home] + tokens_P[p] > loads_R[giver]:
                continue
            saved = np.int64(0) if node == home_node else min(counts_NE[node, expert], movable)
            if node != home_node and saved < smallest:
                continue
            if other_home // ranks_per_node != node:
                saved -= min(tokens_P[p], counts_NE[node, other])
            if saved > best:
                best, place, taker = saved, np.int64(p), rank
        if taker < 0:
            gave_up_R[giver] = True
            continue
        if place == count:
            count += 1
            free_slots_R[taker] -= 1
            ranks_P[place] = taker
        else:
            other = experts_P[place]
            at_home_E[other] += tokens_P[place]
            loads_R[home_E[other]] += tokens_P[place]
            loads_R[taker] -= tokens_P[place]
        node = taker // ranks_per_node
        tokens = excess if node == home_node else max(excess, counts_NE[node, expert])
        tokens = max(min(tokens, movable, target - loads_R[taker]), smallest)
        experts_P[place] = expert
        tokens_P[place] = tokens
        at_home_E[expert] -= tokens
        loads_R[giver] -= tokens
        loads_R[taker] += tokens
        exchanges += 1
    return count, exchanges
