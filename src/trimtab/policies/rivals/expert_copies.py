"""Copies of experts: how many, on which ranks, and tokens split equally over them. Used by EPLB and LAER-MoE."""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
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


def spread_copies(
    load_E: Array, copies_E: Array, home_E: Array, room_R: Array, ranks_per_node: int, *, distinct: bool
) -> Array:
    """Heaviest copy first, each to a node with the fewest copies of its expert and there to the emptiest rank.

    If those nodes are full, the copy goes to the emptiest rank of any node.

    Args:
        load_E: `[E]` float64, shared equally by an expert's copies.
        copies_E: `[E]` int64 copies, the home included where there is one.
        home_E: `[E]` int64, a rank that has the expert in addition to `room_R`; -1 for none.
        room_R: `[R]` int64, copies of a rank.
        distinct: a rank gets no second copy of an expert.

    Returns:
        `[R, E]` int64 copies, homes included. A copy without a possible rank is left out.
    """
    share_E = load_E / copies_E
    copies_RE: Array = _spread(
        share_E, np.argsort(-share_E, kind="stable"), copies_E, home_E, room_R.copy(), ranks_per_node, distinct
    )
    return copies_RE


@kernel
def _spread(  # type: ignore[no-untyped-def]
    share_E, heaviest_first_E, copies_E, home_E, room_R, ranks_per_node, distinct
):
    """See `spread_copies`; `share_E [E]` float64 is the load of a copy, and `room_R` is updated."""
    num_ranks = len(room_R)
    copies_RE = np.zeros((num_ranks, len(share_E)), np.int64)
    rank_load_R = np.zeros(num_ranks)
    in_node_N = np.zeros((num_ranks - 1) // ranks_per_node + 1, np.int64)
    for e in range(len(share_E)):
        if home_E[e] >= 0:
            copies_RE[home_E[e], e] = 1
            rank_load_R[home_E[e]] += share_E[e]
    for e in heaviest_first_E:
        in_node_N[:] = 0
        missing = copies_E[e]
        for r in range(num_ranks):
            in_node_N[r // ranks_per_node] += copies_RE[r, e]
            missing -= copies_RE[r, e]
        for _ in range(missing):
            fewest = in_node_N.min()
            best, best_is_fewest = -1, False
            for r in range(num_ranks):
                if room_R[r] == 0 or (distinct and copies_RE[r, e] > 0):
                    continue
                is_fewest = in_node_N[r // ranks_per_node] == fewest
                is_better = best < 0 or (is_fewest and not best_is_fewest)
                is_level = best >= 0 and is_fewest == best_is_fewest
                if is_better or (is_level and rank_load_R[r] < rank_load_R[best]):
                    best, best_is_fewest = r, is_fewest
            if best < 0:
                break
            copies_RE[best, e] += 1
            room_R[best] -= 1
            rank_load_R[best] += share_E[e]
            in_node_N[best // ranks_per_node] += 1
    return copies_RE


def split_equally(counts_RE: Array, home_E: Array, copies_RE: Array, ranks_per_node: int) -> tuple[Array, Array]:
    """Every source spreads its tokens over the copies in its own node, or over all copies if its node has none.

    The remainder is assigned one token per copy, starting at a copy that differs between sources.

    Args:
        counts_RE: `[R, E]` int64, tokens by source and expert.
        home_E: `[E]` int64. A home without a copy keeps tokens only if there is no copy at all.
        copies_RE: `[R, E]` integers. A rank with two copies of an expert gets two shares.

    Returns:
        Replicas `[P, 2]` (expert, rank), one for a rank's copies of an expert, and quotas `[P, R]`, int64.
    """
    num_ranks, num_experts = counts_RE.shape
    away_RE = copies_RE > 0
    away_RE[home_E, np.arange(num_experts)] = False
    experts_P, ranks_P = np.nonzero(away_RE.T)
    source_R, node_R = np.arange(num_ranks), np.arange(num_ranks) // ranks_per_node

    until_RE = np.cumsum(copies_RE, axis=0)  # copies of an expert up to and including a rank
    first_of_node_R = node_R * ranks_per_node
    before_node_RE = until_RE[first_of_node_R] - copies_RE[first_of_node_R]
    in_node_RE = until_RE[first_of_node_R + ranks_per_node - 1] - before_node_RE
    # Of the copies that source s shares over: their number, and the place of the replica's first copy among them.
    near_PR = in_node_RE[:, experts_P].T
    sharing_PR = np.where(near_PR > 0, near_PR, until_RE[-1, experts_P][:, None])
    copies_P = copies_RE[ranks_P, experts_P].astype(np.int64)
    first_PR = (until_RE[ranks_P, experts_P] - copies_P)[:, None] - np.where(
        near_PR > 0, before_node_RE[:, experts_P].T, 0
    )
    takes_part_PR = (near_PR == 0) | (node_R[ranks_P][:, None] == node_R)
    each_PR, rest_PR = np.divmod(counts_RE.T[experts_P], sharing_PR)

    def extra_before(copy_PR: Array) -> Array:
        """Copies before `copy_PR` that get a token of the remainder, plus a constant of the source."""
        rounds_PR, turn_PR = np.divmod(copy_PR - source_R, sharing_PR)
        return rounds_PR * rest_PR + np.minimum(turn_PR, rest_PR)

    extra_PR = extra_before(first_PR + copies_P[:, None]) - extra_before(first_PR)
    quotas_PR = np.where(takes_part_PR, copies_P[:, None] * each_PR + extra_PR, 0)
    return np.stack([experts_P, ranks_P], axis=1), quotas_PR
