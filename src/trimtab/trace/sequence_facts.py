"""`SequenceFacts`: what a trace holds of each sequence except its routes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError

Windows = tuple[tuple[int, int], ...]
"""Windows of one sequence, `(version, rows)` each; none if all rows are of the same version."""


def windows_array(windows: Iterable[Windows]) -> Array:
    """`[S]`, an array of the windows of each sequence."""
    return np.fromiter(windows, object)


def check_windows(windows: Windows, sequence: int, length: int) -> None:
    """Raise InputError if windows have not the rows of their sequence."""
    rows = [rows for _, rows in windows]
    if min(rows) < 1 or sum(rows) != length:
        raise InputError(f"sequence {sequence} has {length} tokens; its windows have {rows}")


@dataclass(frozen=True, eq=False)
class SequenceFacts:
    """Facts of the S sequences of a trace except their routes; see `RoutingTrace`.

    Attributes:
        lengths: `[S]` int64, routed tokens.
        prompt_lengths: `[S]` int32.
        steps: `[S]` int32.
        sequence_hashes: `[S]` uint64.
        prompt_hashes: `[S]` uint64.
        domains: `[S]` str.
        windows: `[S]` tuples.
    """

    lengths: Array
    prompt_lengths: Array
    steps: Array
    sequence_hashes: Array
    prompt_hashes: Array
    domains: Array
    windows: Array

    def select(self, chosen: Array | slice) -> SequenceFacts:
        """The facts of some sequences: `[S]` bool, indices, or a slice."""
        return SequenceFacts(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def joined(self, *others: SequenceFacts) -> SequenceFacts:
        """The facts of these sequences, followed by those of the others."""
        parts = (self, *others)
        return SequenceFacts(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(self)))
