"""Imbalance that remains with placements that are fixed for a whole step, and with a plan for each micro-step.

A balancer that uses past loads, such as EPLB, places experts once for many micro-steps. Here such a placement is
computed from the step before, and in hindsight from the step itself. The loss that remains in hindsight has two
causes: experts that can't be divided evenly, and change between micro-steps. Only a plan for each micro-step removes
the second, and it needs routing that is known beforehand, or live planning in every layer. That plan is made by the
caller, with as many replicas.

If a trace has one step, its halves are used as steps: the first is the past of the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from trimtab.analysis.balance import balance, home_loads, lost_part
from trimtab.array_type import Array
from trimtab.planner.placement.packing import rebalance

# Replicas per rank, the default of `trimtab plan` and `trimtab simulate`.
SLOTS = 2
# Below this imbalance, a recovered fraction is not reported.
LEAST_LOST = 1e-3


@dataclass(frozen=True)
class PlacementStrategy:
    """A way to place experts for a step, and the imbalance that remains. The names of figures are keys of the JSON.

    Attributes:
        name: its key in the JSON.
        about: description for tables.
        based_on: loads that the placement is computed from: "nothing", "past", "step" or, of a plan, "micro-step".
        max_over_mean_mean, max_over_mean_p99: mean and 99th percentile over instances.
        expert_time_lost: part of expert time for which a rank is idle on average.
        expert_time_lost_whole_step: the same if each step were one micro-step: due to experts that can't be divided
            evenly, or to loads of another step. The rest of `expert_time_lost` is change between micro-steps.
        recovered_fraction: part of the idle time of contiguous homes that it removes; negative if it adds. None without
            idle time.
    """

    name: str
    about: str
    based_on: str
    max_over_mean_mean: float
    max_over_mean_p99: float
    expert_time_lost: float
    expert_time_lost_whole_step: float
    recovered_fraction: float | None


class PlannedLoads(NamedTuple):
    """Rank loads `[M, L, R]` of a step with contiguous homes, and with a plan for each of its micro-steps."""

    about: str
    before_MLR: Array
    after_MLR: Array


@dataclass(frozen=True)
class PlacementComparison:
    """Fixed placements, compared on the same instances.

    Attributes:
        strategies: "static" first, "plan" last. Those based on the past are missing where there is none, "plan" where
            none was made.
        history: what is used as past: "step", "half" or None.
        instances: number of instances compared.
    """

    strategies: tuple[PlacementStrategy, ...]
    history: str | None
    instances: int

    def best(self, based_on: str) -> PlacementStrategy | None:
        """The strategy based on these loads with the least loss, the first of equals; None if there is none."""
        found = [strategy for strategy in self.strategies if strategy.based_on == based_on]
        return min(found, key=lambda strategy: strategy.expert_time_lost, default=None)


def compare_placements(
    counts_MLE: Array, step_starts: Array, ranks: int, planned: PlannedLoads | None = None
) -> PlacementComparison:
    """Compare contiguous homes with placements by the loads of the past and of the step itself, and with a plan.

    Args:
        counts_MLE: `[M, L, E]` integers, tokens by micro-step, layer and expert.
        step_starts: `[steps + 1]`, the first micro-step of each step and the end.
    """
    history: str | None = "step"
    edges = step_starts
    if len(edges) == 2:
        history = "half" if len(counts_MLE) > 1 else None
        edges = np.unique([0, len(counts_MLE) // 2, len(counts_MLE)])
    first = 0 if history is None else 1
    sums_PLE = np.stack([counts_MLE[start:end].sum(axis=0) for start, end in pairwise(edges)])
    compared = counts_MLE[edges[first] :]
    static = home_loads(compared, ranks)
    starts = edges[first:-1] - edges[first]
    strategies = [_strategy("static", "contiguous homes", "nothing", static, static, starts)]
    before = "the step before" if history == "step" else "the first half"
    itself = "the second half" if history == "half" else "the step itself"
    for based_on, shift, source in (("past", 1, before), ("step", 0, itself)):
        if based_on == "past" and history is None:
            continue
        for name, slots, what in (("homes", 0, "homes"), ("replicas", SLOTS, f"homes + {SLOTS} replicas")):
            loads = np.concatenate(
                [
                    placed_loads(counts_MLE[edges[p] : edges[p + 1]], sums_PLE[p - shift], ranks, slots)
                    for p in range(first, len(sums_PLE))
                ]
            )
            about = f"{what} from {source}"
            strategies.append(_strategy(f"{name}_from_{based_on}", about, based_on, loads, static, starts))
    if planned:
        strategies.append(
            _strategy("plan", planned.about, "micro-step", planned.after_MLR, planned.before_MLR, np.zeros(1, np.int64))
        )
    return PlacementComparison(tuple(strategies), history, int(np.count_nonzero(compared.sum(axis=-1))))


def placed_loads(counts_MLE: Array, placed_on_LE: Array, ranks: int, slots: int) -> Array:
    """Rank loads `[M, L, R]` float64 under EPLB's placement for the loads `placed_on_LE`, kept for all micro-steps.

    An expert's tokens are split equally over its copies. Without slots this is LPT: the largest experts first, each to
    the least loaded rank with a free place, the same number on every rank.
    """
    num_experts = counts_MLE.shape[-1]
    per_rank = num_experts // ranks + slots
    rank_of_slot = np.arange(ranks * per_rank) // per_rank
    loads_MLR = np.empty((*counts_MLE.shape[:2], ranks))
    for layer, load_E in enumerate(placed_on_LE):
        expert_of_slot, copies_E = rebalance(load_E, ranks * per_rank, 1, 1, ranks)
        share_ER = np.zeros((num_experts, ranks))
        np.add.at(share_ER, (expert_of_slot, rank_of_slot), 1 / copies_E[expert_of_slot])
        loads_MLR[:, layer] = counts_MLE[:, layer] @ share_ER
    return loads_MLR


def _strategy(
    name: str, about: str, based_on: str, loads_MLR: Array, static_MLR: Array, starts: Array
) -> PlacementStrategy:
    balanced = balance(loads_MLR)
    idle = float(static_MLR.max(axis=-1).sum() - static_MLR.sum() / static_MLR.shape[-1])
    removed = float(static_MLR.max(axis=-1).sum() - loads_MLR.max(axis=-1).sum())
    return PlacementStrategy(
        name=name,
        about=about,
        based_on=based_on,
        max_over_mean_mean=balanced.max_over_mean.mean,
        max_over_mean_p99=balanced.max_over_mean.p99,
        expert_time_lost=balanced.lost,
        expert_time_lost_whole_step=lost_part(np.add.reduceat(loads_MLR, starts, axis=0)),
        recovered_fraction=removed / idle if lost_part(static_MLR) > LEAST_LOST else None,
    )
