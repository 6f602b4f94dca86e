"""`feplb`: whole dynamic experts and their tokens move inside the node while static experts compute.

Source: FEPLB (arXiv 2604.19654); our reimplementation from the paper's abstract and a review of the rest, as it has no
public code. Every rank has a few dynamic experts, 4 by default, and its other experts are static. Tokens are first
dispatched to the homes. Then a CPU thread plans in about 50 us from the exact counts, while static experts compute: the
busiest rank of the node gives its busiest dynamic expert, with all its tokens, to the emptiest rank, until this no
longer helps or the buffers are full (as many entries as dynamic experts). Experts with few tokens stay. The copy engine
moves weights and tokens over NVLink: nothing leaves the node, static experts never move.

Not specified by the source, and our choices:

* which experts are dynamic: the hottest of every rank over the past steps, or its first ones without a past;
* the fewest tokens of a move: an expert moves if the larger of the two loads decreases;
* a busiest dynamic expert that is too large to help: the next one is tried;
* buffers: layers share them;
* planning time by size: 50 us are charged for nodes of 8 ranks, the largest EP of the evaluation (128 experts), and in
  proportion to the ranks of other nodes, since every rank adds as many moves;
* a predictor that rearranges homes at checkpoints is not included.

On equal terms, a rank receives no more experts than it has slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from trimtab.array_type import Array
from trimtab.planner import StepPlan
from trimtab.planner.replicas.whole_experts import InstanceLoad, choose_whole_experts
from trimtab.policies.planning_time import PlanningTime
from trimtab.policies.policy import Choices, Traits, View


@dataclass(frozen=True)
class Feplb:
    """Moves of whole dynamic experts inside the node.

    Attributes:
        dynamic_experts: dynamic experts of every rank, and experts that a rank can receive.
        smallest_move: fewest tokens of an expert that moves.
    """

    traits: ClassVar[Traits] = Traits(
        known_at="layer",
        planning=PlanningTime.published((0, 0.0), (8, 50.0), source="the paper"),
        hops=2,
        within_node=True,
    )
    choices: ClassVar[Choices] = tuple({"dynamic_experts": number} for number in (4, 1, 2, 8, 16))
    dynamic_experts: int = 4
    smallest_move: int = 1

    def plan(self, view: View) -> StepPlan:
        slots = view.cluster.slots_per_rank if view.equal_terms else self.dynamic_experts
        cluster = replace(view.cluster, slots_per_rank=slots)
        dynamic_LE = self.dynamic(view)
        moves_P2 = np.empty((cluster.ranks * slots, 2), np.int64)

        def plan_one(layer: int, counts_RE: Array, home_E: Array) -> tuple[Array, Array]:
            load = InstanceLoad.of(counts_RE.sum(axis=0), home_E, cluster, within_node=True)
            may_move_E = dynamic_LE[layer] & (load.counts_E >= max(self.smallest_move, 1))
            count = choose_whole_experts(load, may_move_E, moves_P2)
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
