"""`PlanningTime` of a balancer, published or measured; `HiddenPlanning`: seconds of it, by when it runs.

The rule is the same for all balancers that plan from a step's recorded routing, and is that of Trimtab's runtime:

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

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.planner import StepPlan, Workload
from trimtab.planner.plan.strategy_choice import SAMPLED_LAYERS

# Of the header: micro-step and rank of a sequence, and int16 homes and uint16 counts of an expert in a layer.
SEQUENCE_BYTES, EXPERT_BYTES = 8, 4


class TimeAtSize(NamedTuple):
    """Planning time of a step with L layers and M micro-steps for one number of ranks, in microseconds on one core.

    The parts differ in when they can run (`HiddenPlanning`). All are 0 if a balancer does not have them.

    Attributes:
        ranks: of the expert-parallel group.
        schedule, schedule_instance: sequences to micro-steps and ranks; it takes M * schedule + L * M *
            schedule_instance.
        homes, homes_instance: homes, and copies that are kept for the step: L * homes + L * M * homes_instance.
        choice: Trimtab's choice of a strategy, from a sample of at most 8 layers and 4 micro-steps.
        instance: replicas and split of one layer of one micro-step. Live planning takes it in each layer.
        join: joining the planned layers of a micro-step, for each layer.
    """

    ranks: int
    schedule: float = 0.0
    schedule_instance: float = 0.0
    homes: float = 0.0
    homes_instance: float = 0.0
    choice: float = 0.0
    instance: float = 0.0
    join: float = 0.0


class Exchange(NamedTuple):
    """Time of collectives between the planners of all ranks, on their CPUs.

    Attributes:
        message_us: latency of a message between two ranks.
        byte_us: time of a byte.
    """

    message_us: float = 0.0
    byte_us: float = 0.0

    def all_gather_us(self, ranks: int, part_bytes: float) -> float:
        """Every rank gets the part of every rank, in a ring, as gloo does it."""
        return (ranks - 1) * (self.message_us + part_bytes * self.byte_us)

    def broadcast_us(self, ranks: int, num_bytes: float) -> float:
        """All ranks get the bytes of one rank, in a binary tree."""
        return math.ceil(math.log2(ranks)) * (self.message_us + num_bytes * self.byte_us)


FREE = Exchange()


@dataclass(frozen=True)
class PlanningTime:
    """Planning time by number of ranks. Without sizes, planning takes no time.

    Attributes:
        sizes: times, ranks ascending.
        source: where they come from.
        route_us: time to count one route (an expert of a token in a layer) of a finished sequence.
        exchange: collectives of planners.
    """

    sizes: tuple[TimeAtSize, ...] = ()
    source: str = "none"
    route_us: float = 0.0
    exchange: Exchange = FREE

    @classmethod
    def measured(cls, policy: str) -> PlanningTime:
        """Returns the time of our implementation, from `planning_times.json`.

        All implementations are measured in one run, by `python -m experiments.planning_times`.
        """
        stored = _stored()
        sizes = tuple(TimeAtSize(**size) for size in stored["policies"][policy])
        return cls(sizes, MEASURED, stored["route_us"], ETHERNET)

    @classmethod
    def published(cls, *sizes: tuple[int, float], source: str) -> PlanningTime:
        """Returns published times: (ranks planned together, microseconds per instance)."""
        return cls(tuple(TimeAtSize(ranks, instance=us) for ranks, us in sizes), source)

    def at(self, ranks: int) -> TimeAtSize:
        """Returns the time for a number of ranks.

        Between the sizes and beyond them times are linear in the ranks; none is negative. A single size holds for any
        number of ranks.
        """
        if len(self.sizes) < 2:
            return self.sizes[0]._replace(ranks=ranks) if self.sizes else TimeAtSize(ranks)
        after = next((place for place, size in enumerate(self.sizes[1:], 1) if size.ranks >= ranks), -1)
        low, high = self.sizes[after - 1], self.sizes[after]
        part = (ranks - low.ranks) / (high.ranks - low.ranks)
        times = (max(0.0, one + part * (other - one)) for one, other in zip(low[1:], high[1:], strict=True))
        return TimeAtSize(ranks, *times)


MEASURED = "measured, our implementation"
NO_PLANNING = PlanningTime()
# Estimates for gloo over TCP between nodes, not measured: 50 us to deliver a message, and 1 GB/s.
ETHERNET = Exchange(message_us=50.0, byte_us=1e-3)


@cache
def _stored() -> Any:
    return json.loads(files("trimtab.policies").joinpath("planning_times.json").read_text(encoding="utf-8"))


# Live planners without published times are charged those of the only one whose time at a stated size is published. Its
# README has 67 to 78 us at 64 ranks with 38 to 51 replicas: 35 us and 0.85 us a replica; replicas grow with the ranks.
ULTRAEP_SIZES: Sequence[tuple[int, float]] = ((0, 35.0), (64, 78.0))


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
