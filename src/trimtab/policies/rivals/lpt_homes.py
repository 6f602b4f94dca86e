"""Homes by longest processing time (LPT): the largest experts first, each to the emptiest node and rank."""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel


def level_homes(loads_LE: Array, home_LE: Array, num_ranks: int, ranks_per_node: int, smallest_gain: float) -> Array:
    """New homes `[L, E]` int16, balanced over nodes and then over their ranks; every rank keeps its number of homes.

    Equivalent ranks and nodes are permuted so that many experts keep their rank. A layer whose busiest node and rank
    would gain too little keeps its homes.

    Args:
        loads_LE: `[L, E]` int64 tokens of every expert.
        home_LE: `[L, E]` integers, current homes.
        smallest_gain: least reduction of max/mean over nodes plus max/mean over ranks.
    """
    new_LE = home_LE.astype(np.int16)
    for layer, loads_E in enumerate(loads_LE):
        old_E = home_LE[layer].astype(np.int64)
        leveled_E = place_longest_first(loads_E, old_E, num_ranks, ranks_per_node)
        gain = imbalance(loads_E, old_E, num_ranks, ranks_per_node) - imbalance(
            loads_E, leveled_E, num_ranks, ranks_per_node
        )
        if gain > smallest_gain:
            new_LE[layer] = _rename_ranks(leveled_E, old_E, num_ranks, ranks_per_node)
    return new_LE


def imbalance(loads_E: Array, home_E: Array, num_ranks: int, ranks_per_node: int) -> float:
    """Max/mean over nodes plus max/mean over ranks; 0 without any load."""
    loads_R = np.bincount(home_E, loads_E, num_ranks)
    if not loads_R.any():
        return 0.0
    loads_N = loads_R.reshape(-1, ranks_per_node).sum(axis=1)
    return float(loads_N.max() / loads_N.mean() + loads_R.max() / loads_R.mean())


def place_longest_first(loads_E: Array, home_E: Array, num_ranks: int, ranks_per_node: int) -> Array:
    """New homes `[E]` int64 by LPT over nodes and, inside them, over ranks.

    Args:
        loads_E: `[E]` int64 tokens of every expert.
        home_E: `[E]` int64, current homes; every rank keeps its number.
    """
    room_NR = np.bincount(home_E, minlength=num_ranks).reshape(-1, ranks_per_node)
    new_E: Array = _place(loads_E, np.argsort(-loads_E, kind="stable"), room_NR)
    return new_E


@kernel
def _place(loads_E, heaviest_first_E, room_NR):  # type: ignore[no-untyped-def]
    """See `place_longest_first`; `room_NR` int64 is by node and rank in the node, and updated."""
    num_nodes, ranks_per_node = room_NR.shape
    loads_NR = np.zeros((num_nodes, ranks_per_node), np.int64)
    new_E = np.empty(len(loads_E), np.int64)
    for e in heaviest_first_E:
        node, rank = -1, -1
        for n in range(num_nodes):
            if room_NR[n].sum() > 0 and (node < 0 or loads_NR[n].sum() < loads_NR[node].sum()):
                node = n
        for r in range(ranks_per_node):
            if room_NR[node, r] > 0 and (rank < 0 or loads_NR[node, r] < loads_NR[node, rank]):
                rank = r
        new_E[e] = node * ranks_per_node + rank
        room_NR[node, rank] -= 1
        loads_NR[node, rank] += loads_E[e]
    return new_E


def _rename_ranks(leveled_E: Array, old_E: Array, num_ranks: int, ranks_per_node: int) -> Array:
    """`leveled_E` with nodes, and ranks within them, renamed to keep many experts at their old rank."""
    kept_RR = np.zeros((num_ranks, num_ranks), np.int64)
    np.add.at(kept_RR, (leveled_E, old_E), 1)
    size_R = kept_RR.sum(axis=1)
    kept_RR[size_R[:, None] != size_R] = -1
    num_nodes = num_ranks // ranks_per_node
    name_R = np.empty(num_ranks, np.int64)
    within = {}
    kept_NN = np.full((num_nodes, num_nodes), -1, np.int64)
    for new, old in np.ndindex(num_nodes, num_nodes):
        rows, columns = (slice(n * ranks_per_node, (n + 1) * ranks_per_node) for n in (new, old))
        if np.array_equal(np.sort(size_R[rows]), np.sort(size_R[columns])):
            within[new, old] = _match(kept_RR[rows, columns])
            kept_NN[new, old] = kept_RR[rows, columns][np.arange(ranks_per_node), within[new, old]].sum()
    for new, old in enumerate(_match(kept_NN)):
        name_R[new * ranks_per_node : (new + 1) * ranks_per_node] = old * ranks_per_node + within[new, int(old)]
    return name_R[leveled_E]


def _match(kept: Array) -> Array:
    """One column for each row, the largest entries first. Pairs below 0 are not allowed; some perfect matching is."""
    columns = np.full(len(kept), -1)
    taken = np.zeros(len(kept), bool)
    for pair in np.argsort(-kept, axis=None, kind="stable"):
        row, column = divmod(int(pair), len(kept))
        if kept[row, column] >= 0 and columns[row] < 0 and not taken[column]:
            columns[row] = column
            taken[column] = True
    return columns
