"""`SequenceCounts`: tokens of each sequence by expert, the input of schedules and workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.trace.counting import count_experts
from trimtab.trace.routing import RoutingTrace


@dataclass(frozen=True, eq=False)
class SequenceCounts:
    """The routing of a step's sequences, as counts.

    Attributes:
        counts_SLE: `[S, L, E]` uint16 or int32, tokens by sequence, layer and expert.
        lengths: `[S]` int64, tokens of each sequence.
        unknown_SL: `[S, L]` int32, rows, (token, expert) pairs, by sequence and layer whose expert is unknown.
    """

    counts_SLE: Array
    lengths: Array
    unknown_SL: Array

    @classmethod
    def from_trace(cls, trace: RoutingTrace) -> SequenceCounts:
        """Count every sequence of a trace."""
        lengths = trace.sequence_lengths
        dtype = np.uint16 if lengths.max(initial=0) < 1 << 16 else np.int32
        counts_SLE = count_experts(trace, np.arange(trace.num_sequences), trace.num_sequences, dtype)
        unknown_SL = lengths[:, None] * trace.top_k - counts_SLE.sum(axis=2, dtype=np.int64)
        return cls(counts_SLE, lengths, unknown_SL.astype(np.int32))

    @classmethod
    def concatenate(cls, parts: Sequence[SequenceCounts]) -> SequenceCounts:
        """The sequences of several parts, one after another."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.counts_SLE for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.unknown_SL for part in parts]),
        )

    def select(self, sequences: Array) -> SequenceCounts:
        """The given sequences, `[N]` indices, in the given order."""
        return SequenceCounts(self.counts_SLE[sequences], self.lengths[sequences], self.unknown_SL[sequences])

    def rows_by_place(self, place_LE: Array, num_places: int, layers: Array) -> Array:
        """Rows `[S, len(layers), num_places]` int32 of each sequence for each place in the given layers.

        Args:
            place_LE: `[L, E]` integers, the rank or node that computes each expert's rows.
        """
        rows_SLP = np.zeros((self.num_sequences, len(layers), num_places), np.int32)
        _add_rows(self.counts_SLE, layers, place_LE, rows_SLP)
        return rows_SLP

    @property
    def top_k(self) -> float:
        """Rows of a token in a layer."""
        rows = self.counts_SLE[:, 0].sum(dtype=np.int64) + self.unknown_SL[:, 0].sum(dtype=np.int64)
        return float(rows / max(1, self.lengths.sum()))

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_layers(self) -> int:
        return int(self.counts_SLE.shape[1])

    @property
    def num_experts(self) -> int:
        return int(self.counts_SLE.shape[2])


@kernel
def _add_rows(counts_SLE, layers, place_LE, rows_SLP):  # type: ignore[no-untyped-def]
    for s in range(counts_SLE.shape[0]):
        for i, layer in enumerate(layers):
            for e in range(counts_SLE.shape[2]):
                rows_SLP[s, i, place_LE[layer, e]] += counts_SLE[s, layer, e]
