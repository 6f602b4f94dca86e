"""Figures of a trace if the experts of every layer had their ids in random order (`permute_experts`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trimtab.analysis.balance import home_loads, lost_part
from trimtab.analysis.cost_estimate import CostEstimate
from trimtab.array_type import Array
from trimtab.trace.permuted_experts import permute_experts

# Random orders, with seeds from 0; the figures are means over them.
PERMUTATIONS = 5


@dataclass(frozen=True)
class PermutedIds:
    """Means over random orders of the experts.

    Attributes:
        permutations: their number.
        expert_time_lost: part of expert time for which a rank is idle on average, with contiguous homes.
        step_s, lost_s: as in `CostEstimate`; None without an estimate.
    """

    permutations: int
    expert_time_lost: float
    step_s: float | None
    lost_s: float | None

    @property
    def lost_part(self) -> float | None:
        """Part of the step's time that imbalance costs."""
        return self.lost_s / self.step_s if self.step_s and self.lost_s is not None else None


def permuted_ids(
    counts_MLE: Array, ranks: int, estimate: Callable[[Array], CostEstimate] | None, groups: int = 1
) -> PermutedIds:
    """Figures with permuted ids.

    Args:
        estimate: from counts `[M, L, E]` to their cost; None without a model.
        groups: of the model's experts.
    """
    lost, costs = [], []
    for seed in range(PERMUTATIONS):
        permuted_MLE = permute_experts(counts_MLE, seed, groups)
        lost.append(lost_part(home_loads(permuted_MLE, ranks)))
        if estimate:
            costs.append(estimate(permuted_MLE))
    return PermutedIds(
        PERMUTATIONS,
        float(np.mean(lost)),
        float(np.mean([cost.step_s for cost in costs])) if costs else None,
        float(np.mean([cost.lost_s for cost in costs])) if costs else None,
    )
