"""Copies of experts: how many, on which ranks, and tokens split equally over them. Used by EPLB and LAER-MoE."""

from __future__ import annotations

import numpy as np

from trimtab.kernels import kernel


@kernel
def count_copies(load_E, total, num_nodes, most):  # type: ignore[no-untyped-def]
    """Assigns copies one by one to the expert with the highest load per copy.

    Args:
        load_E: `[E]` float64.
        total: copies in total, at least one per expert.
        num_nodes: every expert starts with one copy a node where `total` allows, and then grows by whole nodes.
        most: no expert gets more copies.

    Returns:
        `[E]` int64. Copies that no expert needs are not assigned.
    """
    num_experts = len(load_E)
    start = num_nodes if num_nodes * num_experts <= total else 1
    copies_E = np.full(num_experts, min(start, most), np.int64)
    placed = copies_E.sum()
    grows_E = load_E > 0
    while placed < total:
        hottest = -1
        for e in range(num_experts):
            if grows_E[e] and (hottest < 0 or load_E[e] / copies_E[e] > load_E[hottest] / copies_E[hottest]):
                hottest = e
        if hottest < 0:
            break
        more = num_nodes if copies_E[hottest] >= num_nodes else 1
        if placed + more > total or copies_E[hottest] + more > most:
            grows_E[hottest] = False
        else:
            copies_E[hottest] += more
            placed += more
    return copies_E


@kernel
def spread_copies(load_E, copies_E, home_E, room_R, ranks_per_node):  # type: ignore[no-untyped-def]
    """Heaviest copy first, each to a node with the fewest copies of its expert and there to the emptiest rank.

    Args:
        load_E: `[E]` float64, shared equally by an expert's copies.
        copies_E: `[E]` integers, the home included where there is one.
        home_E: `[E]` integers, a rank that has the expert in addition to `room_R`; -1 for none.
        room_R: `[R]` int64, copies of a rank.

    Returns:
        `[R, E]` bool, which ranks hold which experts, homes included. A copy without a possible rank is left out.
    """
    num_ranks = len(room_R)
    held_RE = np.zeros((num_ranks, len(load_E)), np.bool_)
    room_R = room_R.copy()
    rank_load_R = np.zeros(num_ranks)
    share_E = load_E / copies_E
    for e in range(len(load_E)):
        if home_E[e] >= 0:
            held_RE[home_E[e], e] = True
            rank_load_R[home_E[e]] += share_E[e]
    for e in np.argsort(-share_E, kind="mergesort"):
        in_node_N = np.zeros((num_ranks - 1) // ranks_per_node + 1, np.int64)
        for r in range(num_ranks):
            in_node_N[r // ranks_per_node] += held_RE[r, e]
        for _ in range(copies_E[e] - in_node_N.sum()):
            best = -1
            for r in range(num_ranks):
                if room_R[r] == 0 or held_RE[r, e]:
                    continue
                nearer = best < 0 or in_node_N[r // ranks_per_node] < in_node_N[best // ranks_per_node]
                level = best >= 0 and in_node_N[r // ranks_per_node] == in_node_N[best // ranks_per_node]
                if nearer or (level and rank_load_R[r] < rank_load_R[best]):
                    best = r
            if best < 0:
                break
            held_RE[best, e] = True
            room_R[best] -= 1
            rank_load_R[best] += share_E[e]
            in_node_N[best // ranks_per_node] += 1
    return held_RE


@kernel
def split_equally(counts_RE, home_E, copies_RE, ranks_per_node):  # type: ignore[no-untyped-def]
    """Every source spreads its tokens over the copies in its own node, or over all copies if its node has none.

    The remainder is assigned one token per copy, starting at a copy that differs between sources.

    Args:
        counts_RE: `[R, E]` integers, tokens by source and expert.
        home_E: `[E]` integers. A home without a copy keeps tokens only if there is no copy at all.
        copies_RE: `[R, E]` bool or integers. A rank with two copies of an expert gets two shares.

    Returns:
        Replicas `[P, 2]` (expert, rank), one for a rank's copies of an expert, and quotas `[P, R]`, int64.
    """
    num_ranks, num_experts = counts_RE.shape
    num_replicas = 0
    most_copies = np.int64(0)
    for e in range(num_experts):
        copies = np.int64(0)
        for r in range(num_ranks):
            num_replicas += copies_RE[r, e] > 0 and r != home_E[e]
            copies += copies_RE[r, e]
        most_copies = max(most_copies, copies)
    replicas_P2 = np.empty((num_replicas, 2), np.int64)
    quotas_PR = np.zeros((num_replicas, num_ranks), np.int64)
    rank_of_copy = np.empty(most_copies, np.int64)
    replica_of_copy = np.empty(most_copies, np.int64)
    next_replica = 0
    for e in range(num_experts):
        copies = np.int64(0)
        for r in range(num_ranks):
            for _ in range(np.int64(copies_RE[r, e])):
                rank_of_copy[copies] = r
                replica_of_copy[copies] = next_replica if r != home_E[e] else -1
                copies += 1
            if copies_RE[r, e] > 0 and r != home_E[e]:
                replicas_P2[next_replica] = e, r
                next_replica += 1
        for source in range(num_ranks):
            tokens = np.int64(counts_RE[source, e])
            node = source // ranks_per_node
            near = 0
            for c in range(copies):
                near += rank_of_copy[c] // ranks_per_node == node
            sharing = near if near > 0 else copies
            if tokens == 0 or sharing == 0:
                continue
            turn = -source % sharing
            for c in range(copies):
                if near > 0 and rank_of_copy[c] // ranks_per_node != node:
                    continue
                if replica_of_copy[c] >= 0:
                    quotas_PR[replica_of_copy[c], source] += tokens // sharing + (turn < tokens % sharing)
                turn = (turn + 1) % sharing
    return replicas_P2, quotas_PR
