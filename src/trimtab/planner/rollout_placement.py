"""SGLang's placement of experts: judged on later steps, and renewed from each step's routing.

`RolloutPlacement` writes the map of step t with the weight sync of step t + 1, when the engine loads all
experts anyway.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.files import write_atomically
from trimtab.planner.placement.serving_placement import PARTS, count_parts, fill_slots, sglang_map, slot_loads
from trimtab.planner.plan.workload import max_over_mean
from trimtab.trace import RoutingTrace
from trimtab.trace.counting import count_experts
from trimtab.trace.store import TraceReader

# Steps after its own for which a placement is judged, and the rise of max/mean from which a refresh pays.
LATER_STEPS, LEAST_RISE = 4, 0.01


class HeldOut(NamedTuple):
    """Max/mean of rank loads of placements in steps that they were not made from, means over layers and parts of steps.

    Attributes:
        usual: in the engine's own order, of all steps but the first.
        by_age: by the number of steps since the placement's own, from 0; mean of all pairs of steps.
        refresh_after: steps after which a kept placement has at least 1% more than one of the step before; None if that
            was not seen.
    """

    usual: float
    by_age: list[float]
    refresh_after: int | None


def count_steps(trace: TraceReader) -> list[Array]:
    """`count_parts` of each of the last steps of a trace, or of two halves of its sequences if it has one step."""
    steps_S = trace.facts.steps
    steps = np.unique(steps_S)[-LATER_STEPS - 1 :]
    if len(steps) > 1:
        group_S = np.where(steps_S < steps[0], -1, np.searchsorted(steps, steps_S))
    else:
        group_S = np.arange(len(steps_S)) * 2 // max(1, len(steps_S))
    return np.split(count_parts(trace, group_S=group_S), max(2, len(steps)))


def judge_placements(steps: Sequence[Array], num_slots: int, num_ranks: int, ranks_per_node: int) -> HeldOut:
    """Makes a placement from every step and judges it on all later ones.

    Args:
        steps: `[M, L, E]` counts of each step.
    """
    table_SS = np.full((len(steps), len(steps)), np.nan)
    for number, counts_MLE in enumerate(steps):
        slots_LP = fill_slots(counts_MLE, num_slots, num_ranks, ranks_per_node)
        for later in range(number, len(steps)):
            table_SS[number, later] = _max_over_mean(steps[later], slots_LP, num_ranks)
    usual_LP = np.tile(np.arange(num_slots) % steps[0].shape[2], (steps[0].shape[1], 1))
    usual = [_max_over_mean(counts_MLE, usual_LP, num_ranks) for counts_MLE in steps[1:]]
    by_age = [float(table_SS.diagonal(age).mean()) for age in range(len(steps))]
    return HeldOut(float(np.mean(usual)), by_age, refresh_after(table_SS))


def refresh_after(table_SS: Array) -> int | None:
    """`HeldOut.refresh_after` of max/mean by the step of a placement and the step that it is judged on. Both placements
    are judged on the same steps, as steps differ by more than a refresh gains."""
    kept_by_age = {age: table_SS.diagonal(age) for age in range(2, len(table_SS))}
    renewed = table_SS.diagonal(1)
    rises = {age: float((kept / renewed[-len(kept) :]).mean()) for age, kept in kept_by_age.items()}
    return next((age - 1 for age, rise in rises.items() if rise >= 1 + LEAST_RISE), None)


def _max_over_mean(counts_MLE: Array, slots_LP: Array, num_ranks: int) -> float:
    return float(max_over_mean(slot_loads(counts_MLE, slots_LP, num_ranks)).mean())


class RolloutPlacement:
    """Makes a placement from the routing of a step, and writes it at the next weight sync.

    Args:
        path: JSON file to write, for SGLang's `--init-expert-location`; writes are atomic.
        ranks: of the engine's expert parallelism.
        redundant: redundant experts of a layer, over all ranks.
        ranks_per_node: by default all.
        num_layers: decoder layers; by default up to the last with experts.

    Raises:
        InputError: if a number is too small, or SGLang would not take the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        ranks: int,
        redundant: int = 0,
        ranks_per_node: int | None = None,
        num_layers: int | None = None,
    ) -> None:
        at_least_1 = {"ranks": ranks, "ranks_per_node": ranks_per_node, "num_layers": num_layers}
        for name, value in [*at_least_1.items(), ("redundant", redundant + 1)]:
            if value is not None and value < 1:
                raise InputError(f"{name}: it should be at least {int(name != 'redundant')}")
        self.path = Path(path)
        if self.path.suffix != ".json":
            raise InputError(f"{self.path}: SGLang takes a file for a placement only if it is named *.json")
        self._ranks, self._redundant = ranks, redundant
        self._ranks_per_node, self._num_layers = ranks_per_node or ranks, num_layers
        self._counts_MLE: Array | None = None
        self._layers: Array | None = None
        self._sequences = 0
        self._made: tuple[int, Array] | None = None

    def check(self, num_experts: int) -> None:
        """Raise InputError unless ranks and nodes divide the experts with the redundant ones."""
        slots = num_experts + self._redundant
        fill_slots(np.zeros((1, 1, num_experts), np.int64), slots, self._ranks, self._ranks_per_node)

    @property
    def state(self) -> tuple[object, ...]:
        """What must be equal on all ranks that make the placement together: settings, and sizes of the counts."""
        sizes = None if self._counts_MLE is None else self._counts_MLE.shape
        return self._ranks, self._redundant, self._ranks_per_node, self._num_layers, sizes

    def add(self, trace: RoutingTrace) -> None:
        """Count sequences of the present step."""
        parts_S = (self._sequences + np.arange(trace.num_sequences)) % PARTS
        counts_MLE = count_experts(trace, parts_S, PARTS, np.int64)
        self._counts_MLE = counts_MLE if self._counts_MLE is None else self._counts_MLE + counts_MLE
        self._layers, self._sequences = trace.layer_indices, self._sequences + trace.num_sequences

    def make(self, step: int, over_ranks: Callable[[Array], Array] = lambda counts: counts) -> dict[str, float]:
        """Make the placement of a step that has been counted, and begin the next step.

        Args:
            over_ranks: adds up `[M, L, E]` counts of all ranks.

        Returns:
            Max/mean of rank loads of this step: `placement_max_over_mean` with its own placement, and
            `placement_held_out` with the one of the step before, if there was one. Empty without routing.
        """
        own_MLE, before = self._counts_MLE, self._made
        # First, so that the next step doesn't have this one's counts if it fails.
        self._counts_MLE, self._sequences = None, 0
        if own_MLE is None:
            return {}
        counts_MLE = over_ranks(own_MLE)
        slots_LP = fill_slots(counts_MLE, counts_MLE.shape[2] + self._redundant, self._ranks, self._ranks_per_node)
        self._made = step, slots_LP
        maps = {"placement_max_over_mean": slots_LP} | ({"placement_held_out": before[1]} if before else {})
        return {name: _max_over_mean(counts_MLE, each_LP, self._ranks) for name, each_LP in maps.items()}

    def sync(self, step: int) -> Path | None:
        """Write the map for the weights of a step, from an earlier step's routing; before the engine loads them.

        Returns:
            The file; None if no earlier step's placement is ready, and the engine should keep the one that it has.
        """
        if self._made is None or self._made[0] >= step:
            return None
        slots_LP, layers = self._made[1], self._layers
        assert layers is not None
        content = sglang_map(slots_LP, layers, slots_LP.shape[1] - self._redundant, self._num_layers)
        write_atomically(self.path, json.dumps(content) + "\n")
        return self.path
