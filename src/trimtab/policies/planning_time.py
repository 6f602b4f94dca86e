"""`PlanningTime`: planning time that a balancer is charged, published or measured, by the number of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from trimtab.planner.plan.strategy_choice import SAMPLED_LAYERS


class TimeAtSize(NamedTuple):
    """Planning time of a step for one number of ranks, in microseconds.

    A step of L layers and M micro-steps takes step + M * micro_step + L * M * serial on one core, and, spread over
    cores by layer, L * (layer + M * instance). A sample of 8 layers, from which Trimtab chooses its strategy, takes
    `sample`, spread over at most as many cores. Live planning takes `instance` in each layer.
    """

    ranks: int
    micro_step: float = 0.0
    serial: float = 0.0
    layer: float = 0.0
    instance: float = 0.0
    step: float = 0.0
    sample: float = 0.0


@dataclass(frozen=True)
class PlanningTime:
    """Planning time by number of ranks. Without sizes, planning takes no time.

    Attributes:
        sizes: times, ranks ascending.
        source: where they come from.
    """

    sizes: tuple[TimeAtSize, ...] = ()
    source: str = "none"

    @classmethod
    def measured(cls, policy: str) -> PlanningTime:
        """Returns the time of our implementation, from `planning_times.json`.

        All implementations are measured in one run, by `python -m experiments.planning_times`.
        """
        return cls(tuple(TimeAtSize(**size) for size in _stored()["policies"][policy]), MEASURED)

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

    def step_seconds(self, ranks: int, layers: int, micro_steps: int, threads: int) -> float:
        """Returns seconds of planning a whole step on `threads` cores."""
        time = self.at(ranks)
        serial_us = time.step + micro_steps * (time.micro_step + layers * time.serial)
        parallel_us = layers * (time.layer + micro_steps * time.instance) / threads
        return (serial_us + parallel_us + time.sample / min(threads, SAMPLED_LAYERS)) * 1e-6


MEASURED = "measured, our implementation"
NO_PLANNING = PlanningTime()


@cache
def _stored() -> Any:
    return json.loads(files("trimtab.policies").joinpath("planning_times.json").read_text(encoding="utf-8"))


# Live planners without published times are charged those of the only one whose time at a stated size is published. Its
# README has 67 to 78 us at 64 ranks with 38 to 51 replicas: 35 us and 0.85 us a replica; replicas grow with the ranks.
ULTRAEP_SIZES: Sequence[tuple[int, float]] = ((0, 35.0), (64, 78.0))
