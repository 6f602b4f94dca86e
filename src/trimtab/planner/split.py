"""Level four, split: which source rank's tokens go to which copy of an expert."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def split_tokens(  # type: ignore[no-untyped-def]
    counts_RE, home_E, ranks_per_node, experts_P, ranks_P, shares_P, quotas_PR
):
    """Quotas of all replicas of one instance: own rank first, own node next, any node last.

    The tokens that stay at home take part, so that a home keeps its own rank's tokens where it can.

    Args:
        counts_RE: `[R, E]` integer tokens by source rank and expert.
        experts_P, ranks_P, shares_P: `[P]` integers, the replicas and the tokens each takes.
        quotas_PR: `[P, R]` int64, zeroed; filled with the tokens from each source rank.
    """
    num_ranks = len(counts_RE)
    num_replicas = len(experts_P)
    done = np.zeros(num_replicas, np.bool_)
    for first in range(num_replicas):
        if done[first]:
            continue
        expert = experts_P[first]
        left_R = counts_RE[:, expert].astype(np.int64)
        room_P = np.zeros(num_replicas, np.int64)
        home_room = left_R.sum()
        for p in range(first, num_replicas):
            if experts_P[p] == expert:
                done[p] = True
                room_P[p] = shares_P[p]
                home_room -= shares_P[p]
        for distance in range(3):
            for r in range(num_ranks):
                if left_R[r] > 0 and home_room > 0 and _distance(r, home_E[expert], ranks_per_node) <= distance:
                    tokens = min(left_R[r], home_room)
                    left_R[r] -= tokens
                    home_room -= tokens
            for p in range(first, num_replicas):
                for r in range(num_ranks):
                    if room_P[p] == 0:
                        break
                    if left_R[r] > 0 and _distance(r, ranks_P[p], ranks_per_node) <= distance:
                        tokens = min(left_R[r], room_P[p])
                        left_R[r] -= tokens
                        room_P[p] -= tokens
                        quotas_PR[p, r] += tokens


@numba.njit(cache=True, nogil=True)
def _distance(source, rank, ranks_per_node):  # type: ignore[no-untyped-def]
    if source == rank:
        return 0
    return 1 if source // ranks_per_node == rank // ranks_per_node else 2
