"""`RolloutPlacement`: the rollout engine's placement of experts, renewed from each step's routing.

The map of step t is written with the weight sync of step t + 1, when the engine loads all experts anyway.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.files import write_atomically
from trimtab.planner.placement.serving_placement import ENGINES, PARTS, engine_map, fill_slots, slot_loads
from trimtab.planner.plan.workload import max_over_mean
from trimtab.trace import RoutingTrace
from trimtab.trace.counting import count_experts

log = logging.getLogger("trimtab")
# A load of checkpoint weights addresses experts by their first places, while inference uses the present ones.
CORRUPTS = {
    "vllm": "vLLM can load new weights into the first placement of experts after that has changed, which gives wrong "
    "outputs without an error (prime-rl pull request 3583, vLLM 55228): make sure that yours has the fix, or start the "
    "engine anew with the map"
}


class RolloutPlacement:
    """Makes a placement from the routing of a step, and writes it at the next weight sync.

    Args:
        path: JSON file to write; writes are atomic.
        ranks: of the engine's expert parallelism.
        engine: `sglang` or `vllm`, whose format is written.
        redundant: redundant experts of a layer, over all ranks.
        ranks_per_node: by default all.
        num_layers: decoder layers, for SGLang; by default up to the last with experts.

    Raises:
        InputError: if the engine is unknown, or SGLang would not take the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        ranks: int,
        engine: str = "sglang",
        redundant: int = 0,
        ranks_per_node: int | None = None,
        num_layers: int | None = None,
    ) -> None:
        if engine not in ENGINES:
            raise InputError(f"engine: {engine!r} should be one of {', '.join(ENGINES)}")
        self.path = Path(path)
        if engine == "sglang" and self.path.suffix != ".json":
            raise InputError(f"{self.path}: SGLang takes a file for a placement only if it is named *.json")
        self._engine, self._ranks, self._redundant = engine, ranks, redundant
        self._ranks_per_node, self._num_layers = ranks_per_node or ranks, num_layers
        self._counts_MLE: Array | None = None
        self._layers: Array | None = None
        self._sequences = 0
        self._made: tuple[int, Array] | None = None
        self._has_warned = False

    def check(self, num_experts: int) -> None:
        """Raise InputError unless ranks and nodes divide the experts with the redundant ones."""
        slots = num_experts + self._redundant
        fill_slots(np.zeros((1, 1, num_experts), np.int64), slots, self._ranks, self._ranks_per_node)

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
        if own_MLE is None:
            return {}
        # First, so that the next step doesn't have this one's counts if it fails.
        counts_MLE = over_ranks(own_MLE)
        self._counts_MLE, self._sequences = None, 0
        slots_LP = fill_slots(counts_MLE, counts_MLE.shape[2] + self._redundant, self._ranks, self._ranks_per_node)
        self._made = step, slots_LP
        maps = {"placement_max_over_mean": slots_LP} | ({"placement_held_out": before[1]} if before else {})
        return {
            name: float(max_over_mean(slot_loads(counts_MLE, each_LP, self._ranks)).mean())
            for name, each_LP in maps.items()
        }

    def sync(self, step: int) -> Path | None:
        """Write the map for the weights of a step, from an earlier step's routing; before the engine loads them.

        A warning is logged once for an engine that is known to mix up experts when it loads weights.

        Returns:
            The file; None if no earlier step's placement is ready, and the engine should keep the one that it has.
        """
        if self._made is None or self._made[0] >= step:
            return None
        if self._engine in CORRUPTS and not self._has_warned:
            self._has_warned = True
            log.warning(CORRUPTS[self._engine])
        slots_LP, layers = self._made[1], self._layers
        assert layers is not None
        num_layers = self._num_layers or int(layers.max()) + 1
        content = engine_map(self._engine, slots_LP, layers, num_layers, slots_LP.shape[1] - self._redundant)
        write_atomically(self.path, json.dumps(content) + "\n")
        return self.path
