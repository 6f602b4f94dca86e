"""Cost of imbalance in seconds of a step, that of `static` in the simulator; and with ids in random order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.analysis.balance import home_loads, lost_part
from trimtab.array_type import Array
from trimtab.simulator.comparison import simulate_policy
from trimtab.simulator.comparison_case import ComparisonCase
from trimtab.simulator.simulated_case import PERMUTATION_SEED
from trimtab.simulator.step import WAITING, imbalance_cost
from trimtab.trace.numbering import permute_experts, random_orders


@dataclass(frozen=True)
class CostEstimate:
    """Seconds of recompute and update, mean over the simulated steps; of the whole model, also if the trace has fewer
    layers.

    Attributes:
        cluster, model: names.
        step_s: with contiguous homes, the step time of `static` in `trimtab simulate`.
        even_s: with perfectly even routing, that of `balanced`.
        waiting_s: what the step would be shorter if every expert phase took the ranks' mean time, with the same rows.
        causes_s: seconds of the step by cause, `SimulatedStep.causes_s`.
        lost_s_by_layer: by MoE layer of the trace, each as it is: in proportion to the expert time above the mean.
        layers_of_model: its MoE layers; the trace has those of `lost_s_by_layer`.
        steps: simulated.
        sequences: fewest recorded sequences of a simulated step, if steps were scaled; else None.
        assumed: as `ComparisonCase.assumed`.
    """

    cluster: str
    model: str
    step_s: float
    even_s: float
    waiting_s: float
    causes_s: dict[str, float]
    lost_s_by_layer: tuple[float, ...]
    layers_of_model: int
    steps: int = 1
    sequences: int | None = None
    assumed: tuple[str, ...] = ()

    @property
    def layers_traced(self) -> int:
        return len(self.lost_s_by_layer)

    @property
    def lost_s(self) -> float:
        """Seconds that imbalance costs, 0 or more."""
        return self.lost_part * self.step_s

    @property
    def lost_part(self) -> float:
        """Part of the step's time that imbalance costs, 0 to 1."""
        return imbalance_cost(self.step_s, self.even_s)


def estimate_cost(case: ComparisonCase) -> CostEstimate:
    """The cost of imbalance in a case."""
    step, even = (simulate_policy(case, name).simulated for name in ("static", "balanced"))
    experts_MLR = step.work.experts_MLR
    excess_L = (experts_MLR.max(axis=2) - experts_MLR.mean(axis=2)).sum(axis=0)
    lost_s = imbalance_cost(step.step_time_s, even.step_time_s) * step.step_time_s
    share_L = excess_L / (excess_L.sum() or 1.0)
    return CostEstimate(
        cluster=case.cluster.name,
        model=case.model.name,
        step_s=step.step_time_s,
        even_s=even.step_time_s,
        waiting_s=max(0.0, step.causes_s[WAITING]),
        causes_s=step.causes_s,
        lost_s_by_layer=tuple((share_L * lost_s / case.scale).tolist()),
        layers_of_model=case.model.moe_layers,
        steps=case.measured,
        sequences=case.recorded,
        assumed=case.assumed,
    )


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
    layers, experts = counts_MLE.shape[1:]
    orders = [random_orders(layers, experts, seed, groups) for seed in range(PERMUTATIONS)]
    lost = [lost_part(home_loads(permute_experts(counts_MLE, order_LE), ranks)) for order_LE in orders]
    cost = estimate_cost(case.with_permuted_experts(PERMUTATION_SEED)) if case else None
    return PermutedIds(PERMUTATIONS, float(np.mean(lost)), cost.step_s if cost else None, cost.lost_s if cost else None)
