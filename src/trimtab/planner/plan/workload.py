"""`ExpertLoads` and `Workload`: rows by expert, and by source rank and expert, in every micro-step and layer.

A row is a (token, expert) pair. Rows whose expert is unknown, because the trace has no route for the token in that
layer, are counted by source rank; `estimated_MLRE` estimates their experts, in integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.kernels import kernel
from trimtab.planner.schedule.schedule import Schedule
from trimtab.planner.schedule.sequence_counts import SequenceCounts
from trimtab.trace.routing import RoutingTrace


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


@dataclass(frozen=True, eq=False)
class Workload:
    """The load of one step, before any balancing.

    Attributes:
        token_counts_MLRE: `[M, L, R, E]` int32, known rows by micro-step, layer, source rank and expert.
        unknown_MLR: `[M, L, R]` int32, rows by micro-step, layer and source rank whose expert is unknown.
    """

    token_counts_MLRE: Array
    unknown_MLR: Array

    @classmethod
    def known(cls, token_counts_MLRE: Array) -> Workload:
        """A load without unknown rows."""
        return cls(token_counts_MLRE, np.zeros(token_counts_MLRE.shape[:3], np.int32))

    @classmethod
    def from_trace(cls, trace: RoutingTrace, schedule: Schedule) -> Workload:
        """Count a whole step. Raises InputError if the schedule is for another number of sequences."""
        return cls.from_sequences(SequenceCounts.from_trace(trace), schedule)

    @classmethod
    def from_sequences(cls, sequences: SequenceCounts, schedule: Schedule) -> Workload:
        """Join counted sequences. Raises InputError if the schedule is for other sequences."""
        if len(schedule.micro_step) != sequences.num_sequences:
            raise InputError(
                f"the schedule places {len(schedule.micro_step)} sequences; there are {sequences.num_sequences}"
            )
        for places, most in ((schedule.micro_step, schedule.num_micro_steps), (schedule.rank, schedule.num_ranks)):
            if len(places) and not 0 <= places.min() <= places.max() < most:
                raise InputError(f"the schedule has a place {places.max()} beyond its {most} micro-steps or ranks")
        return cls.of_layers(sequences, schedule, np.arange(sequences.num_layers))

    @classmethod
    def of_layers(cls, sequences: SequenceCounts, schedule: Schedule, layers: Array) -> Workload:
        """The load of some layers.

        Args:
            schedule: of the sequences; those with a micro-step below 0 are left out.
            layers: `[N]` integers.
        """
        shape = (schedule.num_micro_steps, len(layers), schedule.num_ranks)
        counts_MLRE = np.zeros((*shape, sequences.num_experts), np.int32)
        _add_sequences(sequences.counts_SLE, layers, schedule.micro_step, schedule.rank, counts_MLRE)
        unknown_MLR = np.zeros(shape, np.int32)
        unknown_SL = sequences.unknown_SL[:, layers]
        if unknown_SL.any():
            chosen = np.flatnonzero(schedule.micro_step >= 0)
            unknown_MRL = np.zeros((shape[0], shape[2], shape[1]), np.int32)
            np.add.at(unknown_MRL, (schedule.micro_step[chosen], schedule.rank[chosen]), unknown_SL[chosen])
            unknown_MLR = np.ascontiguousarray(unknown_MRL.transpose(0, 2, 1))
        return cls(counts_MLRE, unknown_MLR)

    def of_layer(self, layer: int) -> Workload:
        """Of one layer."""
        mine = slice(layer, layer + 1)
        return Workload(
            np.ascontiguousarray(self.token_counts_MLRE[:, mine]), np.ascontiguousarray(self.unknown_MLR[:, mine])
        )

    def select(self, micro_steps: Array, layers: Array) -> Workload:
        """The load of some micro-steps and layers, `[N]` integers each."""
        return Workload(
            self.token_counts_MLRE[np.ix_(micro_steps, layers)], self.unknown_MLR[np.ix_(micro_steps, layers)]
        )

    @property
    def num_micro_steps(self) -> int:
        return int(self.token_counts_MLRE.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.token_counts_MLRE.shape[1])

    @property
    def num_ranks(self) -> int:
        return int(self.token_counts_MLRE.shape[2])

    @property
    def num_experts(self) -> int:
        return int(self.token_counts_MLRE.shape[3])

    @property
    def num_rows(self) -> int:
        """All rows, known and unknown."""
        return int(self.token_counts_MLRE.sum(dtype=np.int64) + self.unknown_MLR.sum(dtype=np.int64))

    @cached_property
    def by_expert(self) -> ExpertLoads:
        """The rows of all source ranks together."""
        unknown_ML = self.unknown_MLR.sum(axis=2, dtype=np.int64)
        return ExpertLoads(self.token_counts_MLRE.sum(axis=2, dtype=np.int64), unknown_ML, self.num_ranks)

    @property
    def mixed_ML(self) -> Array:
        """`[M, L]` bool, instances with unknown rows."""
        return np.asarray(self.unknown_MLR.any(axis=2))

    def home_loads(self, home: Array) -> Array:
        """As `ExpertLoads.home_loads`."""
        return self.by_expert.home_loads(home)

    def expected_loads(self, home: Array) -> Array:
        """As `ExpertLoads.expected_loads`."""
        if not self.unknown_MLR.any():
            return np.zeros(self.unknown_MLR.shape, np.int64)
        return self.by_expert.expected_loads(home)

    @cached_property
    def estimated_MLRE(self) -> Array:
        """`[M, L, R, E]` int32, the known rows and the unknown ones at their estimated experts.

        Sums over experts are the rows of each source rank; sums over source ranks give `expected_loads`. Without
        unknown rows this is `token_counts_MLRE`.
        """
        if not self.unknown_MLR.any():
            return self.token_counts_MLRE
        estimated_MLRE = self.token_counts_MLRE.astype(np.int32)
        _add_expected(self.by_expert.expected_MLE, self.unknown_MLR, estimated_MLRE)
        return estimated_MLRE


def max_over_mean(loads: Array) -> Array:
    """Load of the busiest rank divided by the mean load, `[..., R]` to `[...]`; 1 without any load."""
    totals = loads.sum(axis=-1)
    return np.where(totals > 0, loads.max(axis=-1) * loads.shape[-1] / np.maximum(totals, 1), 1.0)


@kernel
def _add_sequences(counts_SLE, layers, micro_step_S, rank_S, counts_MLRE):  # type: ignore[no-untyped-def]
    for s in range(len(micro_step_S)):
        if micro_step_S[s] < 0:
            continue
        for i in range(len(layers)):
            counts_E = counts_MLRE[micro_step_S[s], i, rank_S[s]]
            for e in range(counts_SLE.shape[2]):
                counts_E[e] += counts_SLE[s, layers[i], e]


@kernel
def _add_expected(expected_MLE, unknown_MLR, counts_MLRE):  # type: ignore[no-untyped-def]
    """Add every source rank's unknown rows to its counts, in proportion to the rows that its instance has left.

    An expert's remaining rows are never exceeded, since a part is at most rounded up.
    """
    num_micro_steps, num_layers, num_ranks = unknown_MLR.shape
    num_experts = expected_MLE.shape[2]
    for m in range(num_micro_steps):
        for layer in range(num_layers):
            left_E = expected_MLE[m, layer].copy()
            left = left_E.sum()
            for r in range(num_ranks):
                rows = np.int64(unknown_MLR[m, layer, r])
                if rows == 0:
                    continue
                cumulative = np.int64(0)
                taken = np.int64(0)
                for e in range(num_experts):
                    cumulative += left_E[e]
                    share = rows * cumulative // left - taken
                    taken += share
                    left_E[e] -= share
                    counts_MLRE[m, layer, r, e] += share
                left -= rows
