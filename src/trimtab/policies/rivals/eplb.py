"""`eplb` and `eplb_oracle`: copies of hot experts packed onto ranks between steps.

Source: DeepSeek's Expert Parallelism Load Balancer (github.com/deepseek-ai/EPLB); `rebalance` is its packing.

Not specified by the source, and our choices:

* where loads come from: `eplb` takes the sum of the last steps, `eplb_oracle` this step's own;
* when experts are placed anew, and from how many steps: a comparison takes the best of `Eplb.choices`;
* the copy that is the home: the one at the current home if there is one, else the one on the rank with the fewest
  homes. Homes may be uneven, but copies are not;
* the copy of a token: every source spreads an expert's tokens equally over its copies; two copies on one rank are one
  in our plan, with two shares;
* expert groups: those that the model's router is limited to. If the nodes don't divide them, that is the source's
  global policy.

On equal terms homes are given. Then replicas are chosen by the same rule (highest load per copy), and are placed,
heaviest first, on the emptiest rank with a free slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trimtab.array_type import Array
from trimtab.planner import Placement, StepPlan
from trimtab.planner.placement.packing import rebalance
from trimtab.policies.planning_time import PlanningTime
from trimtab.policies.policy import Choices, Traits, View
from trimtab.policies.rivals.expert_copies import count_copies, split_equally, spread_copies


@dataclass(frozen=True)
class Eplb:
    """Copies and homes from the last steps. Without history, homes stay and there are no replicas.

    Attributes:
        window: steps of history.
        interval: steps from one placement to the next; None: placed once.
    """

    traits: ClassVar[Traits] = Traits(known_at="past", transfers_start="step", copies="layer slots", relocates=True)
    choices: ClassVar[Choices] = tuple(
        {"interval": interval, "window": window} for interval, window in ((None, 4), (1, 4), (1, 1), (3, 4), (3, 1))
    )
    window: int = 4
    interval: int | None = 1

    def plan(self, view: View) -> StepPlan:
        seen = len(view.past_counts_PLE)
        # The first placement is after the first step.
        last = seen if not seen else 1 if self.interval is None else seen - (seen - 1) % self.interval
        past_PLE = view.past_counts_PLE[max(0, last - self.window) : last]
        if not len(past_PLE):
            no_copies = np.zeros((view.num_layers, view.cluster.ranks, view.num_experts), np.int64)
            return _split_over(view, view.placement, no_copies)
        return _plan(view, past_PLE.sum(axis=0))


@dataclass(frozen=True)
class EplbOracle:
    """The same from the loads of the step itself: EPLB with perfect prediction."""

    traits: ClassVar[Traits] = Traits(
        known_at="step",
        planning=PlanningTime.measured("eplb_oracle"),
        transfers_start="step",
        copies="layer slots",
        relocates=True,
    )

    def plan(self, view: View) -> StepPlan:
        return _plan(view, view.workload.token_counts_MLRE.sum(axis=(0, 2), dtype=np.int64))


def _plan(view: View, load_LE: Array) -> StepPlan:
    placement, copies_LRE = place_copies(view, load_LE)
    return _split_over(view, placement, copies_LRE)


def place_copies(view: View, load_LE: Array) -> tuple[Placement, Array]:
    """Homes, and copies `[L, R, E]` int64 of every expert on every rank, for loads `[L, E]`."""
    ranks, slots = view.cluster.ranks, view.cluster.slots_per_rank
    copies_LRE = np.zeros((view.num_layers, ranks, view.num_experts), np.int64)
    if view.equal_terms:
        for layer, home_E in enumerate(view.placement.home.astype(np.int64)):
            load_E = load_LE[layer].astype(np.float64)
            copies_E = count_copies(load_E, view.num_experts + ranks * slots, 1, ranks)
            copies_LRE[layer] = spread_copies(load_E, copies_E, home_E, np.full(ranks, slots), ranks, distinct=True)
        return view.placement, copies_LRE
    copies_per_rank = -(-view.num_experts // ranks) + slots
    groups = view.costs.operations.expert_groups if view.costs else 1
    rank_of_slot = np.arange(ranks * copies_per_rank) // copies_per_rank
    home_LE = np.empty_like(view.placement.home)
    for layer in range(view.num_layers):
        expert_of_slot, _ = rebalance(
            load_LE[layer], ranks * copies_per_rank, groups, ranks // view.cluster.ranks_per_node, ranks
        )
        np.add.at(copies_LRE[layer], (rank_of_slot, expert_of_slot), 1)
        home_LE[layer] = _choose_homes(view.placement.home[layer].astype(np.int64), copies_LRE[layer])
    return Placement(home_LE), copies_LRE


def _choose_homes(home_E: Array, copies_RE: Array) -> Array:
    """`[E]`: the current home if it has a copy, else the rank with a copy and the fewest homes so far."""
    stays_E = copies_RE[home_E, np.arange(len(home_E))] > 0
    homes_R = np.bincount(home_E[stays_E], minlength=len(copies_RE))
    chosen_E = home_E.copy()
    for expert in np.flatnonzero(~stays_E):
        holders = np.flatnonzero(copies_RE[:, expert])
        chosen_E[expert] = holders[np.argmin(homes_R[holders])]
        homes_R[chosen_E[expert]] += 1
    return chosen_E


def _split_over(view: View, placement: Placement, copies_LRE: Array) -> StepPlan:
    def plan_one(layer: int, counts_RE: Array, home_E: Array) -> tuple[Array, Array]:
        return split_equally(counts_RE, home_E, copies_LRE[layer], view.cluster.ranks)

    return view.plan_instances(plan_one, placement=placement, slots=view.cluster.slots_per_rank)
