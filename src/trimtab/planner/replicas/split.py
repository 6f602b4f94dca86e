"""Level four, split: the tokens of every source rank that each copy of an expert computes."""

from __future__ import annotations

import numpy as np

from trimtab.kernels import kernel


@kernel
def split_tokens(  # type: ignore[no-untyped-def]
    counts_RE, home_E, ranks_per_node, replicas_3P, num_replicas, quotas_PR
):
    """Quotas of all replicas of one instance: own rank first, own node next, any node last.

    The home is one of the copies and keeps its own rank's tokens if possible. For given shares no other split sends
    fewer tokens between nodes.

    Args:
        counts_RE: `[R, E]` integer tokens by source rank and expert.
        home_E: `[E]` integer homes.
        replicas_3P: `[3, >= P]` int64: expert, rank and tokens of each replica.
        quotas_PR: `[>= P, R]` int64, overwritten with the tokens that each replica gets from each source rank.
    """
    num_ranks = len(counts_RE)
    left_R = np.empty(num_ranks, np.int64)
    room_P = replicas_3P[2, :num_replicas].copy()
    # Replicas of one expert form a chain, in plan order.
    next_P = np.full(num_replicas, -1, np.int64)
    is_first_P = np.ones(num_replicas, np.bool_)
    for p in range(num_replicas):
        quotas_PR[p] = 0
        for later in range(p + 1, num_replicas):
            if replicas_3P[0, later] == replicas_3P[0, p]:
                next_P[p] = later
                is_first_P[later] = False
                break
    for first in range(num_replicas):
        if not is_first_P[first]:
            continue
        expert = replicas_3P[0, first]
        home = home_E[expert]
        home_room = np.int64(0)
        for r in range(num_ranks):
            left_R[r] = counts_RE[r, expert]
            home_room += left_R[r]
        p = first
        while p >= 0:
            home_room -= room_P[p]
            p = next_P[p]
        for distance in range(3):
            home_room -= _take(left_R, home_room, home, ranks_per_node, distance, quotas_PR[0], False)
            p = first
            while p >= 0:
                rank = replicas_3P[1, p]
                room_P[p] -= _take(left_R, room_P[p], rank, ranks_per_node, distance, quotas_PR[p], True)
                p = next_P[p]


@kernel
def _take(left_R, room, rank, ranks_per_node, distance, quotas_R, write):  # type: ignore[no-untyped-def]
    """Give `rank` up to `room` tokens from the sources at a distance; returns how many it took."""
    if room == 0:
        return room
    first, last = 0, len(left_R)
    if distance == 0:
        first, last = rank, rank + 1
    elif distance == 1:
        first = rank // ranks_per_node * ranks_per_node
        last = first + ranks_per_node
    taken = np.int64(0)
    for r in range(first, last):
        tokens = min(left_R[r], room - taken)
        if tokens > 0:
            left_R[r] -= tokens
            taken += tokens
            if write:
                quotas_R[r] += tokens
        if taken == room:
            break
    return taken
