"""Whole experts that move to less loaded ranks of their node with all their tokens, as in FEPLB (arXiv 2604.19654)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.specs import ClusterSpec
from trimtab.kernels import kernel


class InstanceLoad(NamedTuple):
    """Tokens of one instance, and the ranks that can help.

    Attributes:
        counts_E: `[E]` int64, tokens of every expert.
        home_E: `[E]` int64, home ranks.
        loads_R: `[R]` int64, tokens of every rank with all experts at home.
        ranks_per_node: neighbouring ranks that share a node.
        ranks_per_domain: neighbouring ranks among which replicas are placed.
        slots: replicas that a rank can hold.
    """

    counts_E: Array
    home_E: Array
    loads_R: Array
    ranks_per_node: int
    ranks_per_domain: int
    slots: int

    @classmethod
    def of(cls, counts_E: Array, home_E: Array, cluster: ClusterSpec, *, within_node: bool) -> InstanceLoad:
        """Returns the load with all experts at home.

        Args:
            counts_E, home_E: `[E]` int64.
            cluster: ranks, nodes and slots.
            within_node: replicas stay in the node of their home; else they may be on any rank.
        """
        loads_R = np.bincount(home_E, counts_E, cluster.ranks).astype(np.int64)
        domain = cluster.ranks_per_node if within_node else cluster.ranks
        return cls(counts_E, home_E, loads_R, cluster.ranks_per_node, domain, cluster.slots_per_rank)


@kernel
def choose_whole_experts(load, may_move_E, moves_P2):  # type: ignore[no-untyped-def]
    """Whole experts to move in one instance, node by node.

    Args:
        load: `InstanceLoad`; `loads_R` is updated.
        may_move_E: `[E]` bool; cleared for experts that move.
        moves_P2: `[R * slots, 2]` int64, filled with expert and new rank.

    Returns:
        The number of moves.
    """
    counts_E, loads_R = load.counts_E, load.loads_R
    taken_R = np.zeros(len(loads_R), np.int64)
    count = 0
    for first in range(0, len(loads_R), load.ranks_per_node):
        while True:
            giver, taker = first, -1
            for r in range(first, first + load.ranks_per_node):
                if loads_R[r] > loads_R[giver]:
                    giver = r
                if taken_R[r] < load.slots and (taker < 0 or loads_R[r] < loads_R[taker]):
                    taker = r
            chosen = -1
            if taker >= 0:
                for e in range(len(counts_E)):
                    helps = may_move_E[e] and load.home_E[e] == giver and loads_R[taker] + counts_E[e] < loads_R[giver]
                    if helps and (chosen < 0 or counts_E[e] > counts_E[chosen]):
                        chosen = e
            if chosen < 0:
                break
            may_move_E[chosen] = False
            loads_R[giver] -= counts_E[chosen]
            loads_R[taker] += counts_E[chosen]
            taken_R[taker] += 1
            moves_P2[count, 0], moves_P2[count, 1] = chosen, taker
            count += 1
    return count
