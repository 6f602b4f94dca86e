"""Level one, order: micro-steps are ordered so that neighbours share replicas.

The order of micro-steps within an optimizer step changes only rounding. A replica that the next micro-step also needs
stays in its slot and is not fetched again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.plan.step_plan import StepPlan
from trimtab.planner.schedule.schedule import Schedule


def order_for_reuse(plan: StepPlan) -> Array:
    """Order `[M]` of micro-steps within each mini-batch: the next is the one that shares most replicas."""
    shared_MM = shared_replicas(plan)
    order: list[int] = []
    for batch in np.unique(plan.mini_batch_of_micro_step):
        left = list(np.flatnonzero(plan.mini_batch_of_micro_step == batch))
        order.append(int(left.pop(0)))
        while left:
            nearest = int(np.argmax(shared_MM[order[-1], left]))
            order.append(int(left.pop(nearest)))
    return np.array(order, np.int64)


def reordered(schedule: Schedule, order: Array) -> Schedule:
    """Returns the schedule with micro-step `order[i]` at position i."""
    new_place = np.empty(len(order), np.int32)
    new_place[order] = np.arange(len(order))
    return replace(schedule, micro_step=new_place[schedule.micro_step])


def shared_replicas(plan: StepPlan) -> Array:
    """Replicas `[M, M]` int64 that two micro-steps have in common: same layer, expert and rank."""
    num_experts = plan.home.shape[1]
    instance = np.repeat(np.arange(len(plan.replica_starts) - 1), np.diff(plan.replica_starts))
    micro_step, layer = np.divmod(instance, plan.num_layers)
    key = (layer * num_experts + plan.replica_experts) * plan.num_ranks + plan.replica_ranks
    keys, index = np.unique(key, return_inverse=True)
    shared = np.zeros((plan.num_micro_steps, plan.num_micro_steps), np.int64)
    has = [np.zeros(len(keys), bool) for _ in range(plan.num_micro_steps)]
    for m in range(plan.num_micro_steps):
        has[m][index[micro_step == m]] = True
    for m in range(plan.num_micro_steps):
        for other in range(m):
            shared[m, other] = shared[other, m] = np.count_nonzero(has[m] & has[other])
    return shared


def reused_replicas(plan: StepPlan) -> int:
    """Number of replicas that the micro-step before also had, at the same layer, expert and rank."""
    return int(np.diagonal(shared_replicas(plan), offset=1).sum())
