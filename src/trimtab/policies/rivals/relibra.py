"""`relibra`: experts are reordered across nodes once a step and replicated inside nodes in every micro-step.

Source: ReLibra (arXiv 2605.08639); our reimplementation from the paper's abstract and summaries of the rest, as it has
no public code. Replay gives the load before training, and planning is off the critical path. Between batches, a
swap-based simulated annealing with a smoothed objective and incremental updates reorders experts so that nodes are
balanced. Within a batch, experts are replicated inside their node in every micro-batch; placing replicas and splitting
tokens are one MILP, for which an incremental greedy is the heuristic. Layers share one replica buffer; weights and
gradients are transferred while attention runs. Rank max/mean 1.00-1.08 at EP 8 to 64; reordering takes 1.4-2.1% of the
batch time.

Not specified by the source, and our choices:

* the smoothed objective: squared node loads, summed over micro-steps, with a smaller term for ranks to reduce replicas,
  and a cost of moves to keep homes where little is gained;
* the greedy: it shifts tokens between copies and adds a copy if that is not enough, until ranks are down to the busiest
  node's mean, a lower bound for in-node replicas (`greedy.py`);
* token traffic between nodes, which is part of their objective, is not included.

On equal terms, homes are given, and replicas stay in the node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from trimtab.kernels import copy_values, kernel
from trimtab.planner import Placement, StepPlan
from trimtab.policies.planning_time import PlanningTime
from trimtab.policies.policy import Choices, Traits, View
from trimtab.policies.rivals.greedy import plan_greedily


@dataclass(frozen=True)
class ReLibra:
    """Homes annealed once a step, replicas inside the node in every micro-step.

    Attributes:
        threshold: target max/mean load over ranks.
        smallest_share: fewest tokens of a replica.
        rank_weight: weight of the squared rank loads, relative to those of nodes.
        move_cost: cost of each expert away from its home in the objective, in squares of an expert's mean load; None:
            homes stay.
        sweeps: swaps tried per layer and expert.
        seed: of the annealing.
    """

    traits: ClassVar[Traits] = Traits(
        known_at="step",
        planning=PlanningTime.measured("relibra"),
        transfers_start="micro-step",
        relocates=True,
        within_node=True,
    )
    choices: ClassVar[Choices] = (
        {"move_cost": 0.1, "threshold": 1.003, "smallest_share": 128},
        {"move_cost": 0.5, "threshold": 1.003, "smallest_share": 128},
        {"move_cost": 3.0, "threshold": 1.003, "smallest_share": 512},
        {"move_cost": 3.0, "threshold": 1.01, "smallest_share": 1024},
        {"move_cost": None, "threshold": 1.003, "smallest_share": 512},
    )
    threshold: float = 1.01
    smallest_share: int = 128
    rank_weight: float = 0.1
    move_cost: float | None = 0.1
    sweeps: int = 300
    seed: int = 0

    def plan(self, view: View) -> StepPlan:
        stays = view.equal_terms or self.move_cost is None
        placement = view.placement if stays else self.reorder(view)
        return plan_greedily(
            view, placement, within_node=True, threshold=self.threshold, smallest_share=self.smallest_share
        )

    def reorder(self, view: View) -> Placement:
        """Homes of the step, with the same number on every rank as before."""
        counts_MLE = view.workload.token_counts_MLRE.sum(axis=2, dtype=np.int64)
        home_LE = view.placement.home.copy()
        objective = Objective(
            view.cluster.ranks, view.cluster.ranks_per_node, float(self.rank_weight), float(self.move_cost or 0.0)
        )
        for layer in range(view.num_layers):
            home_LE[layer] = anneal_homes(
                np.ascontiguousarray(counts_MLE[:, layer].T),
                home_LE[layer].astype(np.int64),
                objective,
                self.sweeps * view.num_experts,
                np.random.default_rng((self.seed, layer)),
            )
        return Placement(home_LE)


class Objective(NamedTuple):
    """Sizes and weights of the objective that `anneal_homes` minimises.

    Attributes:
        num_ranks, ranks_per_node: ranks of the group and of a node.
        rank_weight: weight of the squared rank loads, relative to those of nodes.
        move_cost: cost of each expert away from its first home.
    """

    num_ranks: int
    ranks_per_node: int
    rank_weight: float
    move_cost: float


@kernel
def anneal_homes(counts_EM, home_E, objective, tries, rng):  # type: ignore[no-untyped-def]
    """Swap the homes of two experts at a time to even out node loads in every micro-step.

    The objective is `sum(node_load^2) + rank_weight * sum(rank_load^2)`, averaged over micro-steps, with loads in parts
    of an expert's mean load, plus `move_cost` for each expert away from its first home. Swaps that increase it are
    accepted with a probability that decreases with the temperature.

    Args:
        counts_EM: `[E, M]` int64 tokens by expert and micro-step.
        home_E: `[E]` int64, the first homes.
        objective: `Objective`.
        tries: swaps tried.
        rng: a NumPy random generator.

    Returns:
        `[E]` int64, the best homes found, never worse than the first.
    """
    num_experts, num_micro_steps = counts_EM.shape
    num_ranks, ranks_per_node, rank_weight, move_cost = objective
    node_loads = np.zeros((num_ranks // ranks_per_node, num_micro_steps))
    rank_loads = np.zeros((num_ranks, num_micro_steps))
    # In units of the mean load of an expert, so that the objective does not depend on how many tokens there are.
    parts_EM = np.zeros((num_experts, num_micro_steps))
    for m in range(num_micro_steps):
        total = counts_EM[:, m].sum()
        for e in range(num_experts):
            if total > 0:
                parts_EM[e, m] = counts_EM[e, m] * num_experts / total
            rank_loads[home_E[e], m] += parts_EM[e, m]
            node_loads[home_E[e] // ranks_per_node, m] += parts_EM[e, m]
    now_E = home_E.copy()
    best_E = home_E.copy()
    change, lowest = 0.0, 0.0
    temperature = 0.0
    for i in range(tries):
        a, b = int(rng.random() * num_experts), int(rng.random() * num_experts)
        rank_a, rank_b = now_E[a], now_E[b]
        if rank_a == rank_b:
            continue
        node_a, node_b = rank_a // ranks_per_node, rank_b // ranks_per_node
        delta = 0.0
        for m in range(num_micro_steps):
            more = parts_EM[b, m] - parts_EM[a, m]
            rank_gap = rank_loads[rank_a, m] - rank_loads[rank_b, m]
            delta += 2 * rank_weight * more * (rank_gap + more)
            if node_a != node_b:
                delta += 2 * more * (node_loads[node_a, m] - node_loads[node_b, m] + more)
        delta /= num_micro_steps
        away = (rank_b != home_E[a]) + (rank_a != home_E[b]) - (rank_a != home_E[a]) - (rank_b != home_E[b])
        delta += move_cost * away
        if i < 64:
            temperature = max(temperature, 0.1 * abs(delta))
            continue
        if delta > 0 and rng.random() >= np.exp(-delta / max(temperature * (1 - i / tries) ** 3, 1e-12)):
            continue
        change += delta
        now_E[a], now_E[b] = rank_b, rank_a
        for m in range(num_micro_steps):
            more = parts_EM[b, m] - parts_EM[a, m]
            rank_loads[rank_a, m] += more
            rank_loads[rank_b, m] -= more
            node_loads[node_a, m] += more
            node_loads[node_b, m] -= more
        if change < lowest - 1e-9:
            lowest = change
            copy_values(now_E, best_E)
    return best_E
