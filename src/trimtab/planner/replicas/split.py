"""Level four, split: the tokens of every source rank that each replica computes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel


class Quotas(NamedTuple):
    """Memory for the quotas of replicas, one after another.

    Attributes:
        starts: `[P + 1]` int64, quotas of replica p are from `starts[p]` to `starts[p + 1]`.
        sources: `[Q]` int16, source rank of each quota.
        tokens: `[Q]` int32.
    """

    starts: Array
    sources: Array
    tokens: Array


@kernel
def split_tokens(counts_RE, counts_E, home_E, ranks_per_node, shares, quotas):  # type: ignore[no-untyped-def]
    """Quotas of all replicas of one instance: own rank first, own node next, any node last.

    The home is one of the copies and keeps its own rank's tokens if possible. Where copies compute only part of the
    tokens of their node, every rank of the node sends them the same part of its own, so that links are loaded evenly.
    For given shares no other split sends fewer tokens between nodes.

    Args:
        counts_RE: `[R, E]` integer tokens by source rank and expert.
        counts_E: `[E]` int64, their sums over ranks.
        home_E: `[E]` int16 homes.
        shares: `Shares` of P replicas; those of an expert follow one another.
        quotas: `Quotas` of P replicas or more, which are filled.
    """
    experts_P, ranks_P, tokens_P = shares
    num_ranks, num_replicas = len(counts_RE), len(experts_P)
    num_nodes = num_ranks // ranks_per_node
    left_R = np.empty(num_ranks, np.int64)
    # Nodes whose tokens of the expert are in `left_R`. Most replicas take tokens of their own node alone.
    read_N = np.zeros(num_nodes, np.bool_)
    # Tokens that copies have yet to get, the home's first; and those they get from ranks of their node.
    room_C = np.empty(num_replicas + 1, np.int64)
    near_CR = np.empty((num_replicas + 1, ranks_per_node), np.int64)
    quotas.starts[0] = 0
    quota, begin = np.int64(0), 0
    while begin < num_replicas:
        expert, end = experts_P[begin], begin + 1
        while end < num_replicas and experts_P[end] == expert:
            end += 1
        home, copies = np.int64(home_E[expert]), end - begin + 1
        read_N[:] = False
        room_C[0] = counts_E[expert]
        for c in range(1, copies):
            room_C[c] = tokens_P[begin + c - 1]
            room_C[0] -= room_C[c]
        for c in range(copies):
            rank = home if c == 0 else ranks_P[begin + c - 1]
            _read(counts_RE, expert, rank // ranks_per_node, left_R, read_N)
            tokens = min(left_R[rank], room_C[c])
            near_CR[c] = 0
            near_CR[c, rank % ranks_per_node] = tokens
            left_R[rank] -= tokens
            room_C[c] -= tokens
        for c in range(copies):
            if room_C[c] > 0:
                rank = home if c == 0 else ranks_P[begin + c - 1]
                node_first = rank // ranks_per_node * ranks_per_node
                room_C[c] -= _take_evenly(left_R, node_first, room_C[c], near_CR[c])
        for c in range(1, copies):
            node = ranks_P[begin + c - 1] // ranks_per_node
            for i in range(ranks_per_node):
                if near_CR[c, i] > 0:
                    quotas.sources[quota] = node * ranks_per_node + i
                    quotas.tokens[quota] = near_CR[c, i]
                    quota += 1
            # The rest from the next nodes; what is left then stays at home.
            room = room_C[c]
            for _ in range(num_nodes - 1):
                if room == 0:
                    break
                node = node + 1 if node + 1 < num_nodes else 0
                source, total = node * ranks_per_node, np.int64(0)
                if not read_N[node]:
                    _read(counts_RE, expert, node, left_R, read_N)
                for r in range(source, source + ranks_per_node):
                    total += left_R[r]
                taken, cumulative, part = np.int64(0), np.int64(0), min(room, total)
                for r in range(source, source + ranks_per_node):
                    tokens = left_R[r]
                    if part < total:
                        cumulative += tokens
                        tokens = part * cumulative // total - taken
                        taken += tokens
                    if tokens > 0:
                        quotas.sources[quota] = r
                        quotas.tokens[quota] = tokens
                        left_R[r] -= tokens
                        quota += 1
                room -= part
            quotas.starts[begin + c] = quota
        begin = end


@kernel
def _read(counts_RE, expert, node, left_R, read_N):  # type: ignore[no-untyped-def]
    """Copy a node's tokens of an expert into `left_R`, once."""
    if read_N[node]:
        return
    read_N[node] = True
    ranks_per_node = len(left_R) // len(read_N)
    for r in range(node * ranks_per_node, (node + 1) * ranks_per_node):
        left_R[r] = counts_RE[r, expert]


@kernel
def _take_evenly(left_R, first, room, taken_R):  # type: ignore[no-untyped-def]
    """Move up to `room` tokens of `len(taken_R)` ranks from `left_R`, in proportion; returns their number."""
    total = np.int64(0)
    for i in range(len(taken_R)):
        total += left_R[first + i]
    if total == 0:
        return total
    if room >= total:
        for i in range(len(taken_R)):
            taken_R[i] += left_R[first + i]
            left_R[first + i] = 0
        return total
    cumulative, taken = np.int64(0), np.int64(0)
    for i in range(len(taken_R)):
        cumulative += left_R[first + i]
        tokens = room * cumulative // total - taken
        taken += tokens
        left_R[first + i] -= tokens
        taken_R[i] += tokens
    return taken
