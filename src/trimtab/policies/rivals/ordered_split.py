"""Level four, split: the tokens of every source rank that each copy of an expert computes."""

from __future__ import annotations

import numpy as np

from trimtab.kernels import kernel


@kernel
def split_tokens(counts_RE, home_E, ranks_per_node, shares, quotas_PR):  # type: ignore[no-untyped-def]
    """Quotas of all replicas of one instance: own rank first, own node next, any node last.

    The home is one of the copies and keeps its own rank's tokens if possible. For given shares no other split sends
    fewer tokens between nodes.

    Args:
        counts_RE: `[R, E]` integer tokens by source rank and expert.
        home_E: `[E]` int16 homes.
        shares: `Shares` of P replicas.
        quotas_PR: `[>= P, R]` int64, overwritten with the tokens that each replica gets from each source rank.
    """
    num_ranks = len(counts_RE)
    experts_P, ranks_P, tokens_P = shares
    num_replicas = len(experts_P)
    left_R = np.empty(num_ranks, np.int64)
    at_home_R = np.zeros(num_ranks, np.int64)
    room_P = tokens_P.copy()
    # Replicas of one expert form a chain, in plan order.
    next_P = np.empty(num_replicas, np.int64)
    is_first_P = np.ones(num_replicas, np.bool_)
    for p in range(num_replicas):
        for r in range(num_ranks):
            quotas_PR[p, r] = 0
        next_P[p] = -1
        for later in range(p + 1, num_replicas):
            if experts_P[later] == experts_P[p]:
                next_P[p] = later
                is_first_P[later] = False
                break
    for first in range(num_replicas):
        if not is_first_P[first]:
            continue
        expert = experts_P[first]
        home = np.int64(home_E[expert])
        home_room = np.int64(0)
        for r in range(num_ranks):
            left_R[r] = counts_RE[r, expert]
            home_room += left_R[r]
        p = first
        while p >= 0:
            home_room -= room_P[p]
            p = next_P[p]
        for distance in range(3):
            home_first, home_last = _sources(home, distance, ranks_per_node, num_ranks)
            home_room -= _take(left_R, home_room, home_first, home_last, at_home_R)
            p = first
            while p >= 0:
                source, last = _sources(ranks_P[p], distance, ranks_per_node, num_ranks)
                room_P[p] -= _take(left_R, room_P[p], source, last, quotas_PR[p])
                p = next_P[p]


@kernel
def _sources(rank, distance, ranks_per_node, num_ranks):  # type: ignore[no-untyped-def]
    """First and last + 1 of the ranks at a distance: 0 for the rank itself, 1 for its node, 2 for all."""
    if distance == 0:
        return rank, rank + 1
    if distance == 1:
        first = rank // ranks_per_node * ranks_per_node
        return first, first + ranks_per_node
    return np.int64(0), np.int64(num_ranks)


@kernel
def _take(left_R, room, first, last, taken_R):  # type: ignore[no-untyped-def]
    """Move up to `room` tokens of the sources in [first, last) from `left_R` to `taken_R`; returns their number."""
    taken = np.int64(0)
    for r in range(first, last):
        if taken >= room:
            break
        tokens = min(left_R[r], room - taken)
        left_R[r] -= tokens
        taken_R[r] += tokens
        taken += tokens
    return taken
