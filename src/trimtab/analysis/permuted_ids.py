"""Figures of a trace if the experts of every layer had their ids in random order (`permute_experts`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.analysis.balance import home_loads, lost_part
from trimtab.analysis.cost_estimate import estimate_cost
from trimtab.array_type import Array
from trimtab.simulator.comparison_case import ComparisonCase
from trimtab.simulator.simulated_case import PERMUTATION_SEED
from trimtab.trace.permuted_experts import permute_experts

# Random orders, with seeds from 0; the loss is a mean over them. Seconds are those of `PERMUTATION_SEED`.
PERMUTATIONS = 5


@dataclass(frozen=True)
class PermutedIds:
    """Figures in random orders of the experts.

    Attributes:
        permutations: their number.
        expert_time_lost: part of expert time for which a rank is idle on average, with contiguous homes; mean of all.
        step_s, lost_s: as in `CostEstimate`, in one order; None without an estimate.
    """

    permutations: int
    expert_time_lost: float
    step_s: float | None
    lost_s: float | None

    @property
    def lost_part(self) -> float | None:
        """Part of the step's time that imbalance costs."""
        return self.lost_s / self.step_s if self.step_s and self.lost_s is not None else None


def permuted_ids(counts_MLE: Array, ranks: int, case: ComparisonCase | None) -> PermutedIds:
    """Figures with permuted ids.

    Args:
        case: the steps whose seconds are simulated; None without a model.
    """
    groups = case.model.expert_groups if case else 1
    lost = [lost_part(home_loads(permute_experts(counts_MLE, seed, groups), ranks)) for seed in range(PERMUTATIONS)]
    cost = estimate_cost(case.with_permuted_experts(PERMUTATION_SEED)) if case else None
    return PermutedIds(PERMUTATIONS, float(np.mean(lost)), cost.step_s if cost else None, cost.lost_s if cost else None)
