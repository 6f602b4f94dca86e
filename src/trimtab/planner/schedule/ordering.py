"""Level one, order: micro-steps are ordered so that neighbours share replicas.

The order of micro-steps within an optimizer step changes only rounding. A replica that the next micro-step also needs
stays in its slot and is not fetched again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.planner.schedule.schedule import Schedule


def order_for_reuse(replicas: ReplicaTable, mini_batch_of_micro_step: Array) -> Array:
    """Order `[M]` of micro-steps within each mini-batch: the next is the one that shares most replicas.

    Args:
        replicas: of all instances, those of a micro-step next to each other.
        mini_batch_of_micro_step: `[M]` integers, ascending.
    """
    shared_MM = shared_replicas(replicas, len(mini_batch_of_micro_step))
    order: list[int] = []
    for batch in np.unique(mini_batch_of_micro_step):
        left = list(np.flatnonzero(mini_batch_of_micro_step == batch))
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


def shared_replicas(replicas: ReplicaTable, num_micro_steps: int) -> Array:
    """Replicas `[M, M]` int64 that two micro-steps have in common: same layer, expert and rank."""
    num_layers = (len(replicas.replica_starts) - 1) // num_micro_steps
    micro_step, layer = np.divmod(replicas.instances_P, num_layers)
    # Experts and ranks are int16.
    key = (layer << 32) + (replicas.experts.astype(np.int64) << 16) + replicas.ranks
    keys, index = np.unique(key, return_inverse=True)
    has_MK = np.zeros((num_micro_steps, len(keys)), bool)
    has_MK[micro_step, index] = True
    shared_MM = np.zeros((num_micro_steps, num_micro_steps), np.int64)
    for m in range(num_micro_steps):
        for other in range(m):
            shared_MM[m, other] = shared_MM[other, m] = np.count_nonzero(has_MK[m] & has_MK[other])
    return shared_MM
