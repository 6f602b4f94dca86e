"""`HiddenPlanning`: seconds of planning from a step's recorded routing, by when it runs.

The rule is the same for all balancers that plan from recorded routing, and is that of Trimtab's runtime:

* *During the rollout*, while the last sequences still generate: homes, copies that are kept for the step, and the
  choice of a strategy, from the sequences that have finished. No rank waits.
* *After the last sequence*: it is counted, sequences are scheduled, and the header (schedule, homes, the last counts)
  is broadcast. All ranks wait (`header_s`).
* *During the step*: replicas and split, in one round for each micro-step. Each of R ranks plans ceil(L / R) layers on
  one background thread; the parts are gathered on all ranks, and joined. Rounds follow one another in the order of
  micro-steps, from the header on. A micro-step waits until its round is done.

The schedule packed by length, which all balancers are given, is not charged. Trimtab packs it itself and is charged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.planner import StepPlan, Workload
from trimtab.planner.plan.strategy_choice import SAMPLED_LAYERS
from trimtab.policies.planning_time import PlanningTime

# Of the header: micro-step and rank of a sequence, and int16 homes and uint16 counts of an expert in a layer.
SEQUENCE_BYTES, EXPERT_BYTES = 8, 4


@dataclass(frozen=True)
class HiddenPlanning:
    """Seconds of planning one step.

    Attributes:
        rollout_s: during the rollout.
        header_s: after the last sequence and before the step.
        round_s: of one micro-step, during the step; 0 for a balancer without replicas of micro-steps.
    """

    rollout_s: float = 0.0
    header_s: float = 0.0
    round_s: float = 0.0

    @classmethod
    def of(
        cls,
        planning: PlanningTime,
        plan: StepPlan,
        workload: Workload,
        lengths: Array,
        *,
        layers: int,
        threads: int,
    ) -> HiddenPlanning:
        """Returns the times of a plan.

        Args:
            workload: the load of the plan.
            lengths: `[S]` tokens of each sequence. The longest one is taken to be the last to finish.
            layers: MoE layers of the model; the plan may have only some of them.
            threads: cores that plan during the rollout, where layers don't depend on one another.
        """
        if not planning.sizes:
            return cls()
        time, exchange, ranks = planning.at(plan.num_ranks), planning.exchange, plan.num_ranks
        micro_steps, instances = plan.num_micro_steps, plan.num_micro_steps * layers
        rollout_us = (layers * time.homes + instances * time.homes_instance) / threads
        rollout_us += time.choice / min(threads, SAMPLED_LAYERS)
        top_k = workload.num_rows / max(1, int(lengths.sum()) * plan.num_layers)
        count_us = planning.route_us * int(lengths.max(initial=0)) * top_k * layers
        header_bytes = SEQUENCE_BYTES * len(lengths) + EXPERT_BYTES * layers * plan.home.shape[1]
        header_us = count_us + micro_steps * time.schedule + instances * time.schedule_instance
        header_us += exchange.broadcast_us(ranks, header_bytes)
        round_us = 0.0
        if time.instance > 0.0:
            own_layers = math.ceil(layers / ranks)
            round_us = own_layers * time.instance + layers * time.join
            round_us += exchange.all_gather_us(ranks, own_layers * largest_instance_bytes(plan))
        return cls(*(us * 1e-6 for us in (rollout_us, header_us, round_us)))


def largest_instance_bytes(plan: StepPlan) -> int:
    """Bytes of the replicas and quotas of the instance that has most of them."""
    replicas_I = np.diff(plan.replica_starts)
    quotas_I = np.diff(plan.quota_starts[plan.replica_starts])
    starts, experts, ranks, sources, tokens = (
        array.itemsize
        for array in (
            plan.quota_starts,
            plan.replica_experts,
            plan.replica_ranks,
            plan.quota_sources,
            plan.quota_tokens,
        )
    )
    return int(((starts + experts + ranks) * replicas_I + (sources + tokens) * quotas_I).max(initial=0))
