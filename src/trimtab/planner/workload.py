"""`Workload`: how many tokens each source rank sends to each expert, in every micro-step and layer."""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from trimtab.errors import InputError
from trimtab.planner.schedule import Schedule
from trimtab.planner.sequences import SequenceCounts
from trimtab.trace.routing import Array, RoutingTrace


@dataclass(frozen=True, eq=False)
class Workload:
    """The load of one step, before any balancing.

    Attributes:
        token_counts_MLRE: `[M, L, R, E]` int32, tokens by micro-step, layer, source rank and expert.
        plannable: `[M]` bool, False where a token's route is unknown, so that the counts are not the whole load.
    """

    token_counts_MLRE: Array
    plannable: Array

    @classmethod
    def from_trace(cls, trace: RoutingTrace, schedule: Schedule) -> Workload:
        """Count a whole step. Raises InputError if the schedule is for another number of sequences."""
        return cls.from_sequences(SequenceCounts.from_trace(trace), schedule)

    @classmethod
    def from_sequences(cls, sequences: SequenceCounts, schedule: Schedule) -> Workload:
        """Join sequences that were counted one by one. Raises InputError if the schedule is for other sequences."""
        if len(schedule.micro_step) != sequences.num_sequences:
            raise InputError(
                f"the schedule places {len(schedule.micro_step)} sequences; there are {sequences.num_sequences}"
            )
        for places, most in ((schedule.micro_step, schedule.num_micro_steps), (schedule.rank, schedule.num_ranks)):
            if len(places) and not 0 <= places.min() <= places.max() < most:
                raise InputError(f"the schedule has a place {places.max()} beyond its {most} micro-steps or ranks")
        shape = (schedule.num_micro_steps, sequences.num_layers, schedule.num_ranks, sequences.num_experts)
        counts_MLRE = np.zeros(shape, np.int32)
        _add_sequences(sequences.counts_SLE, schedule.micro_step, schedule.rank, counts_MLRE)
        plannable = np.ones(schedule.num_micro_steps, bool)
        plannable[schedule.micro_step[~sequences.routed]] = False
        return cls(counts_MLRE, plannable)

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

    def home_loads(self, home: Array) -> Array:
        """Tokens `[M, L, R]` int64 that each rank computes with every expert at `home` (`[L, E]` or `[E]`)."""
        counts_MLE = self.token_counts_MLRE.sum(axis=2, dtype=np.int64)
        homes_LE = np.broadcast_to(home, (self.num_layers, self.num_experts))
        at_home_LRE = homes_LE[:, None, :] == np.arange(self.num_ranks)[None, :, None]
        return np.einsum("mle,lre->mlr", counts_MLE, at_home_LRE.astype(np.int64))


def max_over_mean(loads: Array) -> Array:
    """Busiest rank over the mean rank, `[..., R]` to `[...]`; 1 where there is no load at all."""
    totals = loads.sum(axis=-1)
    return np.where(totals > 0, loads.max(axis=-1) * loads.shape[-1] / np.maximum(totals, 1), 1.0)


def fully_routed(trace: RoutingTrace, micro_step: Array, num_micro_steps: int) -> Array:
    """`[M]` bool: is every route of the micro-step's tokens known?"""
    unknown_T = (trace.expert_ids[:, :, 0] == trace.no_route).any(axis=1)
    sequence_T = np.repeat(np.arange(trace.num_sequences), trace.sequence_lengths)
    plannable = np.ones(num_micro_steps, bool)
    plannable[micro_step[sequence_T[unknown_T]]] = False
    return plannable


@numba.njit(cache=True, nogil=True)
def _add_sequences(counts_SLE, micro_step_S, rank_S, counts_MLRE):  # type: ignore[no-untyped-def]
    for s in range(len(micro_step_S)):
        for layer in range(counts_SLE.shape[1]):
            for e in range(counts_SLE.shape[2]):
                counts_MLRE[micro_step_S[s], layer, rank_S[s], e] += counts_SLE[s, layer, e]
