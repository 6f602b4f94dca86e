"""Expert time: ranks synchronise after every layer, so an instance lasts as long as its busiest rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.plan.workload import max_over_mean


@dataclass(frozen=True)
class Balance:
    """max/mean rank load over instances: 1 is perfect balance, R is all on one rank."""

    mean: float
    p50: float
    p99: float
    max: float


def summarise_balance(loads_MLR: Array) -> Balance:
    """`Balance` of rank loads `[M, L, R]`, tokens."""
    ratios = max_over_mean(loads_MLR)
    return Balance(
        float(ratios.mean()), float(np.percentile(ratios, 50)), float(np.percentile(ratios, 99)), float(ratios.max())
    )


def expert_time(loads_MLR: Array) -> int:
    """Tokens of the busiest rank, summed over all instances: proportional to time spent in experts."""
    return int(loads_MLR.max(axis=-1).sum())
