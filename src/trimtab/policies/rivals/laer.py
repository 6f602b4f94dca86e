"""`laer`: expert weights are sharded over all ranks and gathered for every layer and micro-step in a new layout.

Source: LAER-MoE (arXiv 2602.11686, github.com/PKU-DAIR/Hetu-Galvatron). Its planner runs on the CPU during training,
from the routing of the same layer in its last five forward passes: the layout of a micro-step does not use that
micro-step's routing. A rank may have two copies of an expert. Tokens are then split by the live routing, equally over
the copies in the source rank's node, or over all copies if the node has none; a rank with two copies gets two shares.
In our plan they are one replica. In all recorded cases every rank has the load that it has with the source; which of
two experts with equal loads per copy is where may differ.

Not specified by the source, and our choices:

* the first passes of a step: the mean micro-step of the last step replaces missing passes. Without any history every
  expert is only at its home;
* nodes: eight ranks there, the cluster's here;
* which of its two replica counts (by load, and the same for all where that fits) is better: it compares step times of a
  cost model, we the busiest rank of the passes planned from, and use the first if equal;
* capacity: a rank restores as many experts as its share of homes and the cluster's slots. There is no home in LAER-MoE;
  in our plan homes stay where they are and every other copy is a replica, so that a rank may have `capacity` of them.

On equal terms homes are given and hold their experts; the layout fills the cluster's slots.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner import StepPlan
from trimtab.policies.policy import Choices, Traits, View
from trimtab.policies.rivals.expert_copies import count_copies, split_equally, spread_copies


@dataclass(frozen=True)
class Laer:
    """A new layout for every instance, from the layer's last micro-steps.

    Attributes:
        window: micro-steps that a layout is planned from.
    """

    traits: ClassVar[Traits] = Traits(known_at="past", transfers_start="micro-step", copies="unbounded")
    choices: ClassVar[Choices] = tuple({"window": number} for number in (5, 1, 20))
    window: int = 5

    def plan(self, view: View) -> StepPlan:
        ranks, slots, per_node = view.cluster.ranks, view.cluster.slots_per_rank, view.cluster.ranks_per_node
        capacity = -(-view.num_experts // ranks) + slots
        recent = [deque(past_REs, self.window) for past_REs in self._passes_of_last_step(view)]

        def plan_one(layer: int, counts_RE: Array, home_E: Array) -> tuple[Array, Array]:
            if recent[layer]:
                past_RE = np.sum(recent[layer], axis=0)
                if view.equal_terms:
                    copies_RE = layout(past_RE, slots, per_node, home_E=home_E)
                else:
                    copies_RE = layout(past_RE, capacity, per_node)
            else:
                copies_RE = np.zeros(counts_RE.shape, np.int64)
            recent[layer].append(counts_RE.astype(np.float64))
            return split_equally(counts_RE, home_E, copies_RE, per_node)

        return view.plan_instances(plan_one, placement=view.placement, slots=slots if view.equal_terms else capacity)

    def _passes_of_last_step(self, view: View) -> list[list[Array]]:
        """For every layer, `window` times the mean micro-step `[R, E]` float64 of the last step, if there was one."""
        if not len(view.past_counts_PLE):
            return [[] for _ in range(view.num_layers)]
        ranks = view.cluster.ranks
        mean_LE = view.past_counts_PLE[-1] / (view.schedule.num_micro_steps * ranks)
        return [[np.tile(mean_E, (ranks, 1))] * self.window for mean_E in mean_LE]


def layout(counts_RE: Array, capacity: int, ranks_per_node: int, *, home_E: Array | None = None) -> Array:
    """LAER-MoE's greedy layout of one layer.

    Args:
        counts_RE: `[R, E]` tokens by source and expert that the layout should suit.
        capacity: experts that a rank restores; beside its homes, if there are any.
        home_E: `[E]` int64, ranks that have the experts in any case; none by default.

    Returns:
        `[R, E]` int64, copies of every expert on every rank.
    """
    num_ranks, num_experts = counts_RE.shape
    total = num_ranks * capacity + (0 if home_E is None else num_experts)
    if home_E is None:
        home_E = np.full(num_experts, -1)
    load_E = counts_RE.sum(axis=0, dtype=np.float64)
    room_R = np.full(num_ranks, capacity)
    by_load_E = count_copies(load_E, total, num_ranks // ranks_per_node, total)
    best_RE = spread_copies(load_E, by_load_E, home_E, room_R, ranks_per_node, distinct=False)
    if total % num_experts == 0:
        equal_E = np.full(num_experts, total // num_experts)
        equal_RE = spread_copies(load_E, equal_E, home_E, room_R, ranks_per_node, distinct=False)
        if _busiest(counts_RE, equal_RE, ranks_per_node) < _busiest(counts_RE, best_RE, ranks_per_node):
            best_RE = equal_RE
    return best_RE


@kernel
def _busiest(counts_RE, copies_RE, ranks_per_node):  # type: ignore[no-untyped-def]
    """Tokens of the busiest rank if every source splits equally over the copies of its node, or over all."""
    num_ranks, num_experts = counts_RE.shape
    load_R = np.zeros(num_ranks)
    num_nodes = num_ranks // ranks_per_node
    for e in range(num_experts):
        in_node_N = np.zeros(num_nodes, np.int64)
        for r in range(num_ranks):
            in_node_N[r // ranks_per_node] += copies_RE[r, e]
        copies = in_node_N.sum()
        from_node_N = np.zeros(num_nodes)
        from_far = 0.0
        for source in range(num_ranks):
            node = source // ranks_per_node
            if in_node_N[node] > 0:
                from_node_N[node] += counts_RE[source, e] / in_node_N[node]
            elif copies > 0:
                from_far += counts_RE[source, e] / copies
        for r in range(num_ranks):
            load_R[r] += copies_RE[r, e] * (from_node_N[r // ranks_per_node] + from_far)
    return load_R.max()
