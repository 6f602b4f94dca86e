"""Exchanges: an overloaded rank's largest expert gets another copy, in place of the replica that is missed least.

Used where shifting tokens between the copies of an expert is not enough, because a middle-sized expert has too few.

Kernels that run often take a few arrays and not a whole tuple, since numba counts a reference for each.
"""

from __future__ import annotations

import numpy as np

from trimtab.kernels import kernel

WORST = -(np.int64(1) << 60)
# Most ranks that give in one round, so that a round takes little time with many ranks.
MOST_GIVERS = np.int64(64)


# One kernel, since numba counts a reference for every array that is passed to another.
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
    exchanges = np.int64(0)
    givers, number = _most_loaded(loads_R, gave_up_R, target)
    if number == 0:
        return count, exchanges
    most, highest = target - smallest, loads_R[givers[0]]
    lists = _list_replicas(placing, count, home_E, most, highest)
    open_N, number_N, missed_P, is_open_P, on_rank, last_E, before_P = lists
    free = np.flatnonzero(free_slots_R)
    # Ranks and nodes with a copy of the giver's expert.
    has_copy_R, has_copy_N = np.zeros(len(loads_R), np.bool_), np.zeros(len(counts_NE), np.bool_)
    for giver in givers[:number]:
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
        # The loads of givers descend, but for those to which tokens returned.
        if loads_R[giver] > highest:
            lists = _list_replicas(placing, count, home_E, most, loads_R[giver])
            open_N, number_N, missed_P, is_open_P, on_rank, last_E, before_P = lists
        highest = loads_R[giver]
        home_node = giver // ranks_per_node
        has_copy_R[giver] = True
        p = last_E[expert]
        while p >= 0:
            has_copy_R[ranks_P[p]] = True
            has_copy_N[ranks_P[p] // ranks_per_node] = True
            p = before_P[p]
        # In the own node a second copy saves no rows between nodes; in a node with a copy it would not either.
        has_copy_N[home_node] = False
        movable = largest - smallest
        # The new copy takes the place of replica `place`, or a free slot of `taker` if that is `count`.
        place, taker = np.int64(-1), np.int64(-1)
        best = WORST
        for r in free:
            node = np.int64(r // ranks_per_node)
            if free_slots_R[r] == 0 or has_copy_R[r] or has_copy_N[node] or loads_R[r] > most:
                continue
            saved = np.int64(0) if node == home_node else min(counts_NE[node, expert], movable)
            if node != home_node and saved < smallest:
                continue
            if saved > best or (saved == best and loads_R[r] < loads_R[taker]):
                best, place, taker = saved, np.int64(count), np.int64(r)
        for n in range(len(counts_NE)):
            node = np.int64(n)
            saved = np.int64(0) if node == home_node else min(counts_NE[node, expert], movable)
            if has_copy_N[node] or (node != home_node and saved < smallest):
                continue
            first = np.int64(0)
            while first < number_N[node]:
                p = open_N[node, first]
                # Later ones are missed more.
                if saved - missed_P[p] < best:
                    break
                rank, home = ranks_P[p], home_E[experts_P[p]]
                # The other expert's tokens return to its home, which should not become the new problem.
                if loads_R[rank] - tokens_P[p] > most or loads_R[home] + tokens_P[p] > highest or home == rank:
                    is_open_P[p] = False
                    _take_out(open_N, number_N, p, node)
                elif has_copy_R[rank]:
                    first += 1
                else:
                    # The lowest of equals, and a free slot before all.
                    if saved - missed_P[p] > best or p < place < count:
                        best, place, taker = saved - missed_P[p], p, rank
                    break
        has_copy_R[giver] = False
        p = last_E[expert]
        while p >= 0:
            has_copy_R[ranks_P[p]] = False
            has_copy_N[ranks_P[p] // ranks_per_node] = False
            p = before_P[p]
        if taker < 0:
            gave_up_R[giver] = True
            continue
        node = taker // ranks_per_node
        if place == count:
            count += 1
            free_slots_R[taker] -= 1
            ranks_P[place] = taker
            _put_on_rank(on_rank, place, taker)
        else:
            other = experts_P[place]
            at_home_E[other] += tokens_P[place]
            loads_R[home_E[other]] += tokens_P[place]
            loads_R[taker] -= tokens_P[place]
            is_open_P[place] = False
            _take_out(open_N, number_N, place, node)
            _unchain(last_E, before_P, place, other)
        tokens = excess if node == home_node else max(excess, counts_NE[node, expert])
        tokens = max(min(tokens, movable, target - loads_R[taker]), smallest)
        experts_P[place] = expert
        tokens_P[place] = tokens
        at_home_E[expert] -= tokens
        loads_R[giver] -= tokens
        loads_R[taker] += tokens
        missed_P[place] = np.int64(0) if node == home_node else min(tokens, counts_NE[node, expert])
        before_P[place] = last_E[expert]
        last_E[expert] = place
        _open_again(loads_R, placing.found, lists, homes, giver, (most, highest))
        _open_again(loads_R, placing.found, lists, homes, taker, (most, highest))
        exchanges += 1
    return count, exchanges


@kernel
def _most_loaded(loads_R, gave_up_R, target):  # type: ignore[no-untyped-def]
    """The ranks above the target, most loaded first and among equals the lowest, and their number; `MOST_GIVERS` at
    most."""
    givers = np.empty(MOST_GIVERS, np.int64)
    number = np.int64(0)
    for r in range(len(loads_R)):
        if loads_R[r] <= target or gave_up_R[r]:
            continue
        if number < MOST_GIVERS:
            number += 1
        elif loads_R[r] <= loads_R[givers[number - 1]]:
            continue
        # The last one drops out if there are too many.
        i = number - 1
        while i > 0 and loads_R[givers[i - 1]] < loads_R[r]:
            givers[i] = givers[i - 1]
            i -= 1
        givers[i] = r
    return givers, number


@kernel
def _list_replicas(placing, count, home_E, most, highest):  # type: ignore[no-untyped-def]
    """Replicas by node, rank and expert, so that not all are compared for each giver.

    A replica can be replaced if its rank has at most `most` rows without it, and the home of its expert at most
    `highest` with its tokens. All that can be replaced are *open*. Some that can't are open too: they are closed when
    they are found, and opened again when loads have fallen.

    Args:
        placing: a `Placing`, of whose replicas the first `count` count.

    Returns:
        `[N, slots of a node]` int64, open replicas of each node, ascending by rows that would leave the node without
        them, then by number; `[N]` int64, how many there are; `[P]` int64, these rows; `[P]` bool, whether it is open;
        `[R, slots]` int64, replicas of each rank, -1 where it has fewer; `[E]` and `[P]` int64, the last replica of an
        expert and the one before each, -1 if there is none.
    """
    counts_NE, loads_R, _, _, (experts_P, ranks_P, tokens_P) = placing
    slots, num_ranks, num_nodes = len(ranks_P), len(loads_R), len(counts_NE)
    ranks_per_node = num_ranks // num_nodes
    open_N, number_N = np.empty((num_nodes, slots // num_nodes), np.int64), np.zeros(num_nodes, np.int64)
    missed_P, is_open_P = np.empty(slots, np.int64), np.zeros(slots, np.bool_)
    on_rank = np.full((num_ranks, slots // num_ranks), np.int64(-1))
    last_E, before_P = np.full(len(home_E), np.int64(-1)), np.empty(slots, np.int64)
    for p in range(count):
        expert, rank, tokens = experts_P[p], ranks_P[p], tokens_P[p]
        home, node = np.int64(home_E[expert]), rank // ranks_per_node
        missed_P[p] = min(tokens, counts_NE[node, expert]) if home // ranks_per_node != node else np.int64(0)
        before_P[p] = last_E[expert]
        last_E[expert] = p
        _put_on_rank(on_rank, p, rank)
        if loads_R[rank] - tokens <= most and loads_R[home] + tokens <= highest and home != rank:
            is_open_P[p] = True
            _put_in(open_N, number_N, missed_P, p, node)
    return open_N, number_N, missed_P, is_open_P, on_rank, last_E, before_P


@kernel
def _put_on_rank(on_rank, replica, rank):  # type: ignore[no-untyped-def]
    """Add a replica to those of its rank."""
    i = 0
    while on_rank[rank, i] >= 0:
        i += 1
    on_rank[rank, i] = replica


@kernel
def _put_in(open_N, number_N, missed_P, replica, node):  # type: ignore[no-untyped-def]
    """Add a replica to the open ones of its node."""
    i = number_N[node]
    number_N[node] += 1
    while i > 0:
        p = open_N[node, i - 1]
        if missed_P[p] < missed_P[replica] or (missed_P[p] == missed_P[replica] and p < replica):
            break
        open_N[node, i] = p
        i -= 1
    open_N[node, i] = replica


@kernel
def _take_out(open_N, number_N, replica, node):  # type: ignore[no-untyped-def]
    """Remove a replica from the open ones of its node."""
    number_N[node] -= 1
    i = 0
    while open_N[node, i] != replica:
        i += 1
    for j in range(i, number_N[node]):
        open_N[node, j] = open_N[node, j + 1]


@kernel
def _unchain(last_E, before_P, replica, expert):  # type: ignore[no-untyped-def]
    """Remove a replica from its expert's chain."""
    if last_E[expert] == replica:
        last_E[expert] = before_P[replica]
        return
    p = last_E[expert]
    while before_P[p] != replica:
        p = before_P[p]
    before_P[p] = before_P[replica]


@kernel
def _open_again(loads_R, found, lists, homes, rank, bounds):  # type: ignore[no-untyped-def]
    """Open the replicas that can be replaced since the load of a rank fell: those on it, and those of its experts.

    Args:
        loads_R: `[R]` int64 rows of every rank.
        found: `Shares`.
        lists: of `_list_replicas`.
        bounds: `most` and `highest`, as there.
    """
    most, highest = bounds
    home_E, experts_by_home, starts_R = homes
    _, _, _, is_open_P, on_rank, last_E, before_P = lists
    for i in range(on_rank.shape[1]):
        p = on_rank[rank, i]
        if p >= 0 and not is_open_P[p]:
            _open(loads_R, found, lists, home_E, p, most, highest)
    for i in range(starts_R[rank], starts_R[rank + 1]):
        p = last_E[experts_by_home[i]]
        while p >= 0:
            if not is_open_P[p]:
                _open(loads_R, found, lists, home_E, p, most, highest)
            p = before_P[p]


@kernel
def _open(loads_R, found, lists, home_E, replica, most, highest):  # type: ignore[no-untyped-def]
    """Open a replica if it can be replaced."""
    rank, home, tokens = found.ranks[replica], home_E[found.experts[replica]], found.tokens[replica]
    if loads_R[rank] - tokens <= most and loads_R[home] + tokens <= highest and home != rank:
        open_N, number_N, missed_P, is_open_P, _, _, _ = lists
        is_open_P[replica] = True
        _put_in(open_N, number_N, missed_P, replica, rank // (len(loads_R) // len(number_N)))
