"""Row limit: tokens are moved along chains of copies until no rank has more rows than allowed.

A rank above the limit gives tokens of one of its experts to another copy of it, whose rank may pass on tokens of
another expert, and so on to a rank with room. With shortest chains first this is a maximum flow: if it stops above the
limit, no split over these copies meets it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel

NONE = np.int64(-1)


class Copies(NamedTuple):
    """Homes and replicas of one instance. Copy c < E is the home of expert c; copy E + p is replica p.

    Attributes:
        experts_C, ranks_C, tokens_C: `[C]` int64.
        by_rank_C, rank_starts: `[C]` and `[R + 1]` int64, copies ordered by rank.
        by_expert_C, expert_starts: `[C]` and `[E + 1]` int64, copies ordered by expert.
    """

    experts_C: Array
    ranks_C: Array
    tokens_C: Array
    by_rank_C: Array
    rank_starts: Array
    by_expert_C: Array
    expert_starts: Array


@kernel
def meet_limit(instance, shares, count, most_rows):  # type: ignore[no-untyped-def]
    """Shift tokens between copies until no rank has more than `most_rows` rows, or as few more as possible.

    Args:
        instance: an `InstanceRows`.
        shares: `Shares`, whose first `count` replicas are changed. Those that lose all tokens are removed.
        most_rows: rows that a rank may have.

    Returns:
        The number of replicas, and the busiest rank's rows.
    """
    counts_E, fixed_R, homes = instance
    num_experts, num_ranks = len(counts_E), len(fixed_R)
    copies = _list_copies(counts_E, homes.home_E, shares, count, num_ranks)
    loads_R = fixed_R.copy()
    for c in range(num_experts + count):
        loads_R[copies.ranks_C[c]] += copies.tokens_C[c]
    # How each rank was reached: from which copy to which.
    giving_R, taking_R = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    for giver in range(num_ranks):
        while loads_R[giver] > most_rows:
            taker = _find_chain(copies, loads_R, np.int64(giver), most_rows, (giving_R, taking_R))
            if taker < 0:
                break
            tokens = min(loads_R[giver] - most_rows, most_rows - loads_R[taker])
            rank = taker
            while rank != giver:
                tokens = min(tokens, copies.tokens_C[giving_R[rank]])
                rank = copies.ranks_C[giving_R[rank]]
            rank = taker
            while rank != giver:
                copies.tokens_C[giving_R[rank]] -= tokens
                copies.tokens_C[taking_R[rank]] += tokens
                rank = copies.ranks_C[giving_R[rank]]
            loads_R[giver] -= tokens
            loads_R[taker] += tokens
    kept = 0
    for p in range(count):
        if copies.tokens_C[num_experts + p] > 0:
            shares.experts[kept], shares.ranks[kept] = shares.experts[p], shares.ranks[p]
            shares.tokens[kept] = copies.tokens_C[num_experts + p]
            kept += 1
    highest = np.int64(0)
    for r in range(num_ranks):
        highest = max(highest, loads_R[r])
    return kept, highest


@kernel
def _find_chain(copies, loads_R, giver, most_rows, reached):  # type: ignore[no-untyped-def]
    """The nearest rank with room, by a shortest chain of copies from `giver`; -1 if there is none."""
    giving_R, taking_R = reached
    num_ranks = len(loads_R)
    giving_R[:] = NONE
    queue = np.empty(num_ranks, np.int64)
    queue[0] = giver
    first, end = 0, 1
    while first < end:
        rank = queue[first]
        first += 1
        for i in range(copies.rank_starts[rank], copies.rank_starts[rank + 1]):
            source = copies.by_rank_C[i]
            if copies.tokens_C[source] == 0:
                continue
            expert = copies.experts_C[source]
            for j in range(copies.expert_starts[expert], copies.expert_starts[expert + 1]):
                target = copies.by_expert_C[j]
                other = copies.ranks_C[target]
                if other == giver or giving_R[other] >= 0:
                    continue
                giving_R[other], taking_R[other] = source, target
                if loads_R[other] < most_rows:
                    return other
                queue[end] = other
                end += 1
    return NONE


@kernel
def _list_copies(counts_E, home_E, shares, count, num_ranks):  # type: ignore[no-untyped-def]
    num_experts = len(counts_E)
    total = num_experts + count
    experts_C, ranks_C, tokens_C = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total, np.int64)
    for e in range(num_experts):
        experts_C[e], ranks_C[e], tokens_C[e] = e, home_E[e], counts_E[e]
    for p in range(count):
        c = num_experts + p
        experts_C[c], ranks_C[c], tokens_C[c] = shares.experts[p], shares.ranks[p], shares.tokens[p]
        tokens_C[shares.experts[p]] -= shares.tokens[p]
    by_rank_C, rank_starts = _ordered(ranks_C, num_ranks)
    by_expert_C, expert_starts = _ordered(experts_C, num_experts)
    return Copies(experts_C, ranks_C, tokens_C, by_rank_C, rank_starts, by_expert_C, expert_starts)


@kernel
def _ordered(keys_C, num_keys):  # type: ignore[no-untyped-def]
    """Indices ordered by key, and where each key starts."""
    starts = np.zeros(num_keys + 1, np.int64)
    for key in keys_C:
        starts[key + 1] += 1
    for key in range(num_keys):
        starts[key + 1] += starts[key]
    ordered, place = np.empty(len(keys_C), np.int64), starts[:-1].copy()
    for c in range(len(keys_C)):
        ordered[place[keys_C[c]]] = c
        place[keys_C[c]] += 1
    return ordered, starts
