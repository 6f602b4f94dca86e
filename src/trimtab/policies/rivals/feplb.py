"""FEPLB: whole dynamic experts and their tokens move inside the node while static experts compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner import StepPlan
from trimtab.policies.policy import Traits, View


@dataclass(frozen=True)
class Feplb:
    """FEPLB (arXiv 2604.19654; no public code), from the paper's abstract and a review of the rest.

    Published: every rank has a few dynamic experts, 4 by default, and its other experts are static. Tokens are first
    dispatched to the homes. Then a CPU thread plans in about 50 us from the exact counts, while static experts
    compute: the busiest rank of the node gives its busiest dynamic expert, with all its tokens, to the emptiest rank,
    until this no longer helps or the buffers are full (as many entries as dynamic experts). Experts with few tokens
    stay. The copy engine moves weights and tokens over NVLink: nothing leaves the node, static experts never move.

    Unpublished details and our choices: *which* experts are dynamic: the hottest of every rank over the past steps, or
    its first ones without a past. The fewest tokens of a move: we move if the larger of the two loads decreases. If the
    busiest dynamic expert is too large to help, we try the next one. Layers share the buffers. A predictor that
    rearranges homes at checkpoints is not included.

    On equal terms, a rank receives no more experts than it has slots.

    Attributes:
        dynamic_experts: dynamic experts of every rank, and experts that a rank can receive.
        smallest_move: fewest tokens of an expert that moves.
    """

    traits: ClassVar[Traits] = Traits(known_at="layer", published_us=50.0, hops=2, within_node=True)
    dynamic_experts: int = 4
    smallest_move: int = 1

    def plan(self, view: View) -> StepPlan:
        cluster = view.cluster
        slots = cluster.slots_per_rank if view.equal_terms else self.dynamic_experts
        dynamic_LE = self.dynamic(view)
        moves_P2 = np.empty((cluster.ranks * slots, 2), np.int64)

        def plan_one(layer: int, counts_RE: Array, home_E: Array) -> tuple[Array, Array]:
            count = move_experts(
                counts_RE.sum(axis=0),
                home_E,
                dynamic_LE[layer],
                cluster.ranks,
                cluster.ranks_per_node,
                slots,
                self.smallest_move,
                moves_P2,
            )
            return moves_P2[:count].copy(), counts_RE.T[moves_P2[:count, 0]].copy()

        return view.plan_instances(plan_one, placement=view.placement, slots=slots)

    def dynamic(self, view: View) -> Array:
        """`[L, E]` bool, the dynamic experts of the step: on every rank, those with the most tokens in the past."""
        past_LE = view.past_counts_PLE.sum(axis=0)
        dynamic_LE = np.zeros(past_LE.shape, bool)
        for layer, home_E in enumerate(view.placement.home):
            for rank in range(view.cluster.ranks):
                mine = np.flatnonzero(home_E == rank)
                hottest = mine[np.argsort(-past_LE[layer, mine], kind="stable")]
                dynamic_LE[layer, hottest[: self.dynamic_experts]] = True
        return dynamic_LE


@kernel
def move_experts(  # type: ignore[no-untyped-def]
    counts_E, home_E, dynamic_E, num_ranks, ranks_per_node, slots, smallest_move, moves_P2
):
    """Whole experts to move in one instance, node by node.

    Args:
        counts_E: `[E]` int64 tokens of every expert.
        home_E: `[E]` int64 home ranks.
        dynamic_E: `[E]` bool, experts that may move.
        slots: experts that a rank can receive.
        smallest_move: fewest tokens of an expert that moves.
        moves_P2: `[R * slots, 2]` int64, filled with expert and new rank.

    Returns:
        The number of moves.
    """
    loads = np.zeros(num_ranks, np.int64)
    for e in range(len(counts_E)):
        loads[home_E[e]] += counts_E[e]
    free = np.full(num_ranks, slots, np.int64)
    may_move_E = dynamic_E & (counts_E >= max(smallest_move, 1))
    count = 0
    for first in range(0, num_ranks, ranks_per_node):
        while True:
            giver, taker = first, -1
            for r in range(first, first + ranks_per_node):
                if loads[r] > loads[giver]:
                    giver = r
                if free[r] > 0 and (taker < 0 or loads[r] < loads[taker]):
                    taker = r
            chosen = -1
            if taker >= 0:
                for e in range(len(counts_E)):
                    helps = may_move_E[e] and home_E[e] == giver and loads[taker] + counts_E[e] < loads[giver]
                    if helps and (chosen < 0 or counts_E[e] > counts_E[chosen]):
                        chosen = e
            if chosen < 0:
                break
            may_move_E[chosen] = False
            loads[giver] -= counts_E[chosen]
            loads[taker] += counts_E[chosen]
            free[taker] -= 1
            moves_P2[count, 0], moves_P2[count, 1] = chosen, taker
            count += 1
    return count
