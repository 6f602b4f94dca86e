"""Shifts: tokens are shifted between an expert's home and its replicas until ranks are even, with few rows more between
nodes.

A copy in a node computes the tokens of that node first. Tokens beyond those come from other nodes in any case, so they
are shifted freely. A node's own tokens leave it only as far as a rank is above the target.
"""

from __future__ import annotations

import numpy as np

from trimtab.kernels import kernel


@kernel
def shift_shares(placing, count, home_E, limits, target, sweeps):  # type: ignore[no-untyped-def]
    """Shift tokens until no rank is above the target, in at most `sweeps` sweeps over all replicas.

    Args:
        placing: a `Placing`; loads, tokens at home and shares are changed.
        count: replicas.
        home_E: `[E]` int16.
        limits: `Limits`.
        target: load that no rank should exceed, rows.
    """
    counts_NE, loads_R, at_home_E, _, (experts_P, ranks_P, tokens_P) = placing
    ranks_per_node, smallest = np.int64(limits.ranks_per_node), limits.smallest_share
    # Looked up rather than divided.
    node_R = np.empty(len(loads_R), np.int64)
    for node in range(len(loads_R) // ranks_per_node):
        for r in range(node * ranks_per_node, (node + 1) * ranks_per_node):
            node_R[r] = node
    for _ in range(sweeps):
        highest = np.int64(0)
        for r in range(len(loads_R)):
            highest = max(highest, loads_R[r])
        if highest <= target:
            return
        is_changed = False
        for p in range(count):
            expert, rank = experts_P[p], ranks_P[p]
            home = np.int64(home_E[expert])
            gap = loads_R[home] - loads_R[rank]
            giver_load = max(loads_R[home], loads_R[rank])
            tokens = at_home_E[expert] if gap > 0 else tokens_P[p]
            most = tokens - smallest
            half = abs(gap) // 2
            if half == 0 or most <= 0:
                continue
            node, home_node = node_R[rank], node_R[home]
            if node == home_node:
                moved = min(half, most)
            else:
                own = counts_NE[home_node if gap > 0 else node, expert]
                moved = max(min(half, tokens - own, most), np.int64(0))
                more = min(giver_load - moved - target, half - moved)
                if more > 0:
                    moved = min(moved + more, max(most, moved))
            # A home without tokens gets a whole share or none.
            if moved <= 0 or (gap < 0 and at_home_E[expert] == 0 and moved < smallest):
                continue
            if gap < 0:
                moved = -moved
            at_home_E[expert] -= moved
            tokens_P[p] += moved
            loads_R[home] -= moved
            loads_R[rank] += moved
            is_changed = True
        if not is_changed:
            return
