"""`PlanningTime`: planning time that a balancer is charged, published or measured, by the number of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class PlanningTime:
    """Planning time of a step, on one core or on a GPU. Without sizes, planning takes no time.

    Attributes:
        sizes: (ranks, microseconds per layer, microseconds per instance), ranks ascending. A step of L layers and M
            micro-steps takes L * (per layer + M * per instance).
        serial: the part of it that does not get faster with more cores, 0 to 1. The rest is by layer.
        source: where the time comes from.
    """

    sizes: tuple[tuple[int, float, float], ...] = ()
    serial: float = 0.0
    source: str = "none"

    @classmethod
    def measured(cls, policy: str) -> PlanningTime:
        """Returns the time of our implementation, from `planning_times.json`.

        Every implementation is measured in the same way, by `python -m experiments.planning_times`.
        """
        times = _stored()["policies"][policy]
        return cls(tuple(map(tuple, times["sizes"])), times["serial"], "measured, our implementation")

    @classmethod
    def published(cls, *sizes: tuple[int, float], source: str) -> PlanningTime:
        """Returns published times: (ranks planned together, microseconds per instance)."""
        return cls(tuple((ranks, 0.0, us) for ranks, us in sizes), 0.0, source)

    def us(self, ranks: int, micro_steps: int) -> float:
        """Returns microseconds of planning an instance, in a step of some micro-steps, on one core or on the GPU.

        Between the sizes and beyond them times are linear in the ranks; none is negative. A single size holds for any
        number of ranks.
        """
        return self._at(ranks, 1) / micro_steps + self._at(ranks, 2) if self.sizes else 0.0

    def _at(self, ranks: int, column: int) -> float:
        if len(self.sizes) == 1:
            return self.sizes[0][column]
        after = next((place for place, size in enumerate(self.sizes[1:], 1) if size[0] >= ranks), len(self.sizes) - 1)
        low, high = self.sizes[after - 1], self.sizes[after]
        slope = (high[column] - low[column]) / (high[0] - low[0])
        return max(0.0, low[column] + slope * (ranks - low[0]))


NO_PLANNING = PlanningTime()


@cache
def _stored() -> Any:
    return json.loads(files("trimtab.policies").joinpath("planning_times.json").read_text(encoding="utf-8"))


# Planners on a GPU without published times are charged those of the only one that publishes them by size. Its README
# has 67 to 78 us at 64 ranks with 38 to 51 replicas: 35 us and 0.85 us a replica, and replicas grow with the ranks.
ULTRAEP_SIZES: Sequence[tuple[int, float]] = ((0, 35.0), (64, 78.0))
