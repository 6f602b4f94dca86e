"""Figures of one observed step: what imbalance costs, and what each way to balance it would save."""

from __future__ import annotations

from collections import deque

import numpy as np

from trimtab.analysis.balance import balance, home_loads, lost_part
from trimtab.analysis.fixed_placements import LEAST_LOST, SLOTS, placed_loads
from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, ModelSpec, StepCosts
from trimtab.cluster.operations import OperationCosts
from trimtab.observe.step_counts import CountedStep
from trimtab.planner import Placement, StepPlan
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.planner.planner import plan_schedule
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.policies.static import Static
from trimtab.simulator.step import WAITING, simulate_step

# Steps whose loads homes are chosen by.
PAST_STEPS = 8


class StepFigures:
    """Computes the figures of one step after another.

    Args:
        cluster: of one expert-parallel group.
        model: for figures of the whole step's time; None: they are left out.
    """

    def __init__(self, cluster: ClusterSpec, model: ModelSpec | None) -> None:
        self._cluster, self._model = cluster, model
        self._past: deque[Array] = deque(maxlen=PAST_STEPS)

    def of(self, step: CountedStep) -> dict[str, float]:
        """The figures of a step; `docs/observe.md` explains each.

        Those of `rehome` and `eplb` need the step before; those of the step's time need a model.
        """
        workload, ranks = step.workload, self._cluster.ranks
        counts_MLE = workload.token_counts_MLRE.sum(axis=2, dtype=np.int64)
        loads_MLR = home_loads(counts_MLE, ranks)
        even = balance(loads_MLR)
        found = {
            "idle_share": even.lost,
            "max_vio": even.max_vio.mean,
            "max_vio_worst": even.max_vio.worst,
            "peak_rows": float(loads_MLR.max()),
            "tokens_per_micro_step": float(step.lengths.sum()) / workload.num_micro_steps,
            "unknown_share": float(workload.unknown_MLR.sum()) / max(1, workload.num_rows),
        }
        homes = Placement.contiguous(workload.num_layers, workload.num_experts, ranks)
        recovered = {}
        if self._past:
            for name, slots in (("rehome", 0), ("eplb", SLOTS)):
                recovered[name] = _recovered(loads_MLR, placed_loads(counts_MLE, self._past[-1], ranks, slots))
        costs = StepCosts.of(self._cluster, self._model, moe_layers=workload.num_layers) if self._model else None
        planned = plan_schedule(
            StepLoads.of_workloads([workload], step.schedule, step.lengths),
            step.schedule,
            homes,
            self._cluster,
            costs=costs,
            past_PLE=np.stack(self._past) if self._past else None,
        )
        # Both with the expected rows of unknown routes, which no plan can move.
        recovered["plan"] = _recovered(workload.home_loads(homes.home), planned.plans[0].rank_loads(workload))
        self._past.append(counts_MLE.sum(axis=0))
        found |= {f"{name}_recovers": part for name, part in recovered.items()}
        if self._model:
            static = StepPlan.from_replicas(
                step.schedule, homes, ReplicaTable.none(workload.mixed_ML.size), mixed_ML=workload.mixed_ML,
                cluster=self._cluster,
            )  # fmt: skip
            operations = OperationCosts.of(self._cluster, self._model, moe_layers=workload.num_layers)
            simulated = simulate_step(static, workload, step.lengths, operations, self._cluster, Static.traits)
            lost_share = simulated.causes_s[WAITING] / simulated.step_time_s
            found["lost_share"] = lost_share
            found |= {f"{name}_gain": part * lost_share for name, part in recovered.items()}
            # With transfers, moves and planning, which the product leaves out.
            found["plan_gain"] = 1 - planned.predicted_s / planned.nothing_s
        return found


def _recovered(before_MLR: Array, after_MLR: Array) -> float:
    """The part of idle expert time that is gone under other loads; 0 without idle time."""
    if lost_part(before_MLR) <= LEAST_LOST:
        return 0.0
    longest = before_MLR.max(axis=-1).sum()
    return float((longest - after_MLR.max(axis=-1).sum()) / (longest - before_MLR.mean(axis=-1).sum()))
