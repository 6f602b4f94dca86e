"""`ExpertLoads`: rows by expert in every micro-step and layer, summed over source ranks.

Loads of ranks follow from them, so that a rank needs no counts of the other ranks. All estimates are made in integers,
so that they are the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner.schedule.schedule import Schedule
from trimtab.planner.schedule.sequence_counts import SequenceCounts


@dataclass(frozen=True, eq=False)
class ExpertLoads:
    """The load of one step, before any balancing.

    Attributes:
        counts_MLE: `[M, L, E]` integer, known rows by micro-step, layer and expert.
        unknown_ML: `[M, L]` integer, rows by micro-step and layer whose expert is unknown.
        num_ranks: R.
    """

    counts_MLE: Array
    unknown_ML: Array
    num_ranks: int

    @classmethod
    def from_sequences(cls, sequences: SequenceCounts, schedule: Schedule) -> ExpertLoads:
        """Sum counted sequences by micro-step."""
        shape = schedule.num_micro_steps, sequences.num_layers
        counts_MLE, unknown_ML = np.zeros((*shape, sequences.num_experts), np.int32), np.zeros(shape, np.int64)
        np.add.at(counts_MLE, schedule.micro_step, sequences.counts_SLE)
        np.add.at(unknown_ML, schedule.micro_step, sequences.unknown_SL)
        return cls(counts_MLE, unknown_ML, schedule.num_ranks)

    @property
    def mixed_ML(self) -> Array:
        """`[M, L]` bool, instances with unknown rows."""
        return np.asarray(self.unknown_ML > 0)

    def home_loads(self, home: Array) -> Array:
        """Rows `[M, L, R]` int64 that each rank computes with every expert at `home` (`[L, E]` or `[E]`).

        Exact where all routes are known; unknown rows are included as `expected_loads`.
        """
        return self._at_home(self.counts_MLE, home) + self.expected_loads(home)

    def expected_loads(self, home: Array) -> Array:
        """Estimated unknown rows `[M, L, R]` int64 at each expert's `home` (`[L, E]` or `[E]`).

        An instance's sum over ranks is its number of unknown rows.
        """
        if not self.unknown_ML.any():
            return np.zeros((*self.unknown_ML.shape, self.num_ranks), np.int64)
        return self._at_home(self.expected_MLE, home)

    @cached_property
    def expected_MLE(self) -> Array:
        """`[M, L, E]` int64, the unknown rows of each instance at their estimated experts.

        Expert e of a layer gets a part in proportion to its known rows over the whole step plus one. The cumulative
        sums over experts are rounded down, so that an instance's sum is exact.
        """
        weights_LE = self.counts_MLE.sum(axis=0, dtype=np.int64) + 1
        cumulative_LE = np.cumsum(weights_LE, axis=1)
        ends_MLE = self.unknown_ML[:, :, None].astype(np.int64) * cumulative_LE // cumulative_LE[:, -1:]
        return np.diff(ends_MLE, axis=2, prepend=0)

    def _at_home(self, rows_MLE: Array, home: Array) -> Array:
        loads_MLR = np.zeros((*self.unknown_ML.shape, self.num_ranks), np.int64)
        _add_at_home(rows_MLE, np.ascontiguousarray(np.broadcast_to(home, rows_MLE.shape[1:])), loads_MLR)
        return loads_MLR


@kernel
def _add_at_home(rows_MLE, home_LE, loads_MLR):  # type: ignore[no-untyped-def]
    num_micro_steps, num_layers, num_experts = rows_MLE.shape
    for m in range(num_micro_steps):
        for layer in range(num_layers):
            for e in range(num_experts):
                loads_MLR[m, layer, home_LE[layer, e]] += rows_MLE[m, layer, e]
