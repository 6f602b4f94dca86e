"""Random slices in place of the planner's, in time or late."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np

from helpers.random_plans import random_plan
from trimtab.array_type import Array
from trimtab.planner import GroupPlans, Placement, Schedule, Workload
from trimtab.planner.plan.plan_settings import PlanSettings
from trimtab.planner.plan.slices import SliceRules
from trimtab.planner.replicas.kernel_values import Limits
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.runtime import steps

# Longest wait of a micro-step for late slices, and longest delay of a round.
PATIENCE_S, DELAY_S = 0.004, 0.02
NEVER_LATE_S, STALL_S = 1e6, 0.5


def as_header(planned: GroupPlans, *, slots: int, waits: bool) -> GroupPlans:
    """The same schedule and homes, with rules for random slices.

    Args:
        waits: whether micro-steps wait for their slices.
    """
    cluster = mock.Mock(ranks=1, ranks_per_node=1, slots_per_rank=slots)
    patience_s = NEVER_LATE_S if waits else PATIENCE_S * planned.plans[0].num_micro_steps
    rules = SliceRules(PlanSettings().limits(cluster), 0.0, 1.0, 1, patience_s)
    return planned._replace(plans=tuple(plan.without_replicas() for plan in planned.plans), slices=rules)


@dataclass
class RandomSlices:
    """Replaces `SlicePlanner`: slices of a random plan, which the ranks of a group draw alike.

    Attributes:
        delay: called in each round with its micro-steps.
    """

    workload: Workload
    home_LE: Array
    limits: Limits
    delay: Callable[[range], None]

    def plan(self, micro_steps: range, layers: range) -> list[ReplicaTable]:
        self.delay(micro_steps)
        counts = self.workload.token_counts_MLRE
        rng = np.random.default_rng([int(counts.sum()), int(self.home_LE.astype(np.int64).sum()), len(counts)])
        nothing = np.zeros(0, np.int32)
        schedule = Schedule(nothing, nothing, np.zeros(len(counts), np.int32), self.workload.num_ranks)
        plan = random_plan(rng, self.workload, schedule, slots=self.limits.slots, placement=Placement(self.home_LE))
        return [plan.replicas.select(np.array(micro_steps) * plan.num_layers + layer) for layer in layers]


@contextmanager
def random_slices(delay: Callable[[range], None]) -> Iterator[None]:
    """A context in which sessions start random slices."""

    def make(workload: Workload, home_LE: Array, limits: Limits) -> RandomSlices:
        return RandomSlices(workload, home_LE, limits, delay)

    with mock.patch.object(steps, "SlicePlanner", make):
        yield


def in_time(_: range) -> None:
    """No delay."""


def fails(micro_steps: range) -> None:
    """The second round fails."""
    if micro_steps.start:
        raise MemoryError("no memory for a plan")


def stalls(micro_steps: range) -> None:
    """The second round takes long."""
    if micro_steps.start:
        time.sleep(STALL_S)


def random_delay(seed: Sequence[int]) -> Callable[[range], None]:
    """Delays that differ between rounds and ranks, also before the first round."""
    rng = np.random.default_rng(seed)
    return lambda _: time.sleep(float(rng.choice([0.0, rng.random() * DELAY_S])))
