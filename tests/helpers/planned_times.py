"""Steps whose planning is timed."""

from __future__ import annotations

import numpy as np

from trimtab import ClusterSpec, Placement, Schedule, StepPlan, Workload
from trimtab.array_type import Array


def idle_step(ranks: int, micro_steps: int, layers: int = 2) -> tuple[StepPlan, Workload, Array]:
    """A plan without replicas, its load and lengths: sequences of 100 and 40 tokens, top-2, an expert on each rank."""
    schedule = Schedule(np.zeros(2, np.int32), np.zeros(2, np.int32), np.zeros(micro_steps, np.int32), ranks)
    counts_MLRE = np.zeros((micro_steps, layers, ranks, ranks), np.int32)
    counts_MLRE[0, :, 0, :2] = 140
    workload = Workload.known(counts_MLRE)
    nothing = [np.empty((0, 2), np.int64)] * (micro_steps * layers)
    plan = StepPlan.from_instances(
        schedule,
        Placement.contiguous(layers, ranks, ranks),
        nothing,
        [np.empty((0, ranks), np.int64)] * (micro_steps * layers),
        mixed_ML=workload.mixed_ML,
        cluster=ClusterSpec(ranks, min(ranks, 8), 1),
    )
    return plan, workload, np.array([100, 40])
