"""Random slices in place of the planner's, in time or late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np

from helpers.random_plans import random_plan
from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec
from trimtab.planner import Placement, PlannedStep, Schedule
from trimtab.planner.plan.plan_settings import PlanSettings
from trimtab.planner.plan.slices import SlicePlanner, SliceRules
from trimtab.planner.replicas.paths import links_of
from trimtab.planner.replicas.replica_table import ReplicaTable

# Longest wait of a micro-step for late slices, and longest delay of a round.
PATIENCE_S, DELAY_S = 0.004, 0.02
NEVER_LATE_S, LONGEST_STALL_S = 1e6, 60.0
RELEASE = threading.Event()


def as_header(planned: PlannedStep, *, slots: int, waits: bool) -> PlannedStep:
    """The same schedule and homes, with rules for random slices.

    Args:
        waits: whether micro-steps wait for their slices.
    """
    plan = planned.plans[0]
    cluster = ClusterSpec(plan.num_ranks, plan.ranks_per_node, slots)
    links = links_of(cluster)
    # Every second expert of every layer on every node.
    nodes = plan.num_ranks // plan.ranks_per_node
    entries = np.argwhere(np.arange(nodes * plan.home.size).reshape(nodes, *plan.home.shape) % 2 == 0)
    mirrors = (entries,) * (planned.schedule.num_ranks // plan.num_ranks)
    patience_s = NEVER_LATE_S if waits else PATIENCE_S * planned.plans[0].num_micro_steps
    rules = SliceRules(PlanSettings().limits(cluster), links, mirrors, 0.0, 1.0, 1, patience_s)
    return replace(planned, plans=tuple(plan.without_replicas() for plan in planned.plans), slices=rules)


def in_time(_: range) -> None:
    """No delay."""


@dataclass(frozen=True, eq=False)
class RandomSlices(SlicePlanner):
    """Slices of a random plan of a rank's layers, and random paths.

    Attributes:
        delay: called in each round with its micro-steps.
    """

    delay: Callable[[range], None] = in_time

    def paths(self, replicas: ReplicaTable) -> Array:
        wanted_P = np.random.default_rng(len(replicas.ranks)).integers(0, 2, len(replicas.ranks)).astype(np.uint8)
        layer_P = replicas.instances_P % len(self.home_LE)
        return wanted_P * self.mirrored_NLE[replicas.ranks // self.links.ranks_per_node, layer_P, replicas.experts]

    def plan(self, micro_steps: range, layers: range) -> list[ReplicaTable]:
        self.delay(micro_steps)
        counts = self.workload.token_counts_MLRE
        rng = np.random.default_rng([int(counts.sum()), int(self.home_LE.astype(np.int64).sum()), len(counts)])
        nothing = np.zeros(0, np.int32)
        schedule = Schedule(nothing, nothing, np.zeros(len(counts), np.int32), self.workload.num_ranks)
        plan = random_plan(rng, self.workload, schedule, slots=self.limits.slots, placement=Placement(self._home_LE))
        places = [layer - self.first_layer for layer in layers]
        return [plan.replicas.select(np.array(micro_steps) * plan.num_layers + place) for place in places]


@contextmanager
def random_slices(delay: Callable[[range], None]) -> Iterator[None]:
    """A context in which sessions start random slices."""

    def make(*args: Any) -> RandomSlices:
        return replace(made(RandomSlices, *args), delay=delay)

    made: Callable[..., RandomSlices] = SlicePlanner.of.__func__  # type: ignore[attr-defined]
    with mock.patch.object(SlicePlanner, "of", make):
        yield


def fails(micro_steps: range) -> None:
    """The second round fails."""
    if micro_steps.start:
        raise MemoryError("no memory for a plan")


def stalls(micro_steps: range) -> None:
    """The second round takes until it is released."""
    if micro_steps.start:
        RELEASE.wait(LONGEST_STALL_S)


def random_delay(seed: Sequence[int]) -> Callable[[range], None]:
    """Delays that differ between rounds and ranks, also before the first round."""
    rng = np.random.default_rng(seed)
    return lambda _: time.sleep(float(rng.choice([0.0, rng.random() * DELAY_S])))
