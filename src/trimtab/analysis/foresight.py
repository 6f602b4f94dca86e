"""Gains of fixed placements, with and without knowing the step, and so of known routing (foresight).

A balancer that uses past loads, such as EPLB, places experts once for many micro-steps. Here its placement is computed
from
the step before, and in hindsight from the step itself. The loss that remains with the latter is due to change between
micro-steps, and to experts that can't be divided evenly. Only a plan for each micro-step removes it. Such a plan needs
routing that is known beforehand, or live planning in every layer.

If a trace has one step, its halves are used as steps: the first is the past of the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trimtab.analysis.balance import home_loads, lost_part, ratios
from trimtab.array_type import Array
from trimtab.planner.placement.packing import rebalance

# Replicas per rank, the default of `trimtab plan` and `trimtab simulate`.
SLOTS = 2
# Below this imbalance, a recovered part is not reported.
LEAST_LOST = 1e-3


@dataclass(frozen=True)
class Way:
    """A placement method and its remaining imbalance.

    Attributes:
        name: key in the JSON.
        about: in words.
        knows: "nothing", "past" or "step": what the placement is computed from.
        max_over_mean: mean over instances.
        p99: of the same.
        lost: part of expert time for which a rank is idle on average.
        lost_in_sum: the part of `lost` that remains if a step is one micro-step: experts that can't be divided evenly,
            or another step's loads. The rest is change between micro-steps.
        won_back: part of the idle time of contiguous homes that it removes; negative if it adds. None without idle
            time.
    """

    name: str
    about: str
    knows: str
    max_over_mean: float
    p99: float
    lost: float
    lost_in_sum: float
    won_back: float | None


@dataclass(frozen=True)
class Foresight:
    """Placement methods, compared on the same instances.

    Attributes:
        ways: "static" first. Those that know the past are missing where there is none.
        history: what is used as past: "step", "half" or None.
        instances: that were compared.
    """

    ways: tuple[Way, ...]
    history: str | None
    instances: int

    def best(self, knows: str) -> Way | None:
        """Of the methods with this knowledge, the one with the least loss; of equals the first."""
        found = [way for way in self.ways if way.knows == knows]
        return min(found, key=lambda way: way.lost) if found else None


def foresight(counts_MLE: Array, step_starts: Array, ranks: int) -> Foresight:
    """Compare placements.

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
    ways = [_way("static", "contiguous homes", "nothing", static, static, starts)]
    before = "the step before" if history == "step" else "the first half"
    itself = "the second half" if history == "half" else "the step itself"
    for knows, shift, source in (("past", 1, before), ("step", 0, itself)):
        if knows == "past" and history is None:
            continue
        for name, slots, what in (("homes", 0, "homes"), ("replicas", SLOTS, f"homes, {SLOTS} replicas")):
            loads = np.concatenate(
                [
                    placed_loads(counts_MLE[edges[p] : edges[p + 1]], sums_PLE[p - shift], ranks, slots)
                    for p in range(first, len(sums_PLE))
                ]
            )
            ways.append(_way(f"{name}_from_{knows}", f"{what} by {source}", knows, loads, static, starts))
    return Foresight(tuple(ways), history, int(np.count_nonzero(compared.sum(axis=-1))))


def placed_loads(counts_MLE: Array, placed_on_LE: Array, ranks: int, slots: int) -> Array:
    """Rank loads `[M, L, R]` float64 under EPLB's placement for the loads `placed_on_LE`, kept for all micro-steps.

    An expert's tokens are split equally over its copies. Without slots this is LPT: the largest experts first, each to
    the emptiest rank with room, the same number on every rank.
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


def _way(name: str, about: str, knows: str, loads_MLR: Array, static_MLR: Array, starts: Array) -> Way:
    found = ratios(loads_MLR)
    found = found[~np.isnan(found)]
    waited = float(static_MLR.max(axis=-1).sum() - static_MLR.sum() / static_MLR.shape[-1])
    removed = float(static_MLR.max(axis=-1).sum() - loads_MLR.max(axis=-1).sum())
    enough = lost_part(static_MLR) > LEAST_LOST
    return Way(
        name, about, knows,
        float(found.mean()) if len(found) else 1.0,
        float(np.percentile(found, 99)) if len(found) else 1.0,
        lost_part(loads_MLR),
        lost_part(np.add.reduceat(loads_MLR, starts, axis=0)),
        removed / waited if enough else None,
    )  # fmt: skip
