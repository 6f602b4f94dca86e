"""`ExpertPlaces`: the rank and the row of each expert of a layer, which stay as they are.

Each of R ranks holds H = E / R experts, in rows 0 to H - 1. In the order of the framework's group experts are
contiguous; ranks of a session may have other numbers, see `Topology`. To reorder experts, renumber them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trimtab.array_type import Array


@dataclass(frozen=True, eq=False)
class ExpertPlaces:
    """The places of all experts of one layer.

    Attributes:
        home_E: `[E]` int16, the home rank of every expert; every rank has as many experts.
        rows_E: `[E]` int64, the row of every expert on its home rank.
    """

    home_E: Array
    rows_E: Array

    @classmethod
    def at(cls, home_E: Array) -> ExpertPlaces:
        """The places with these homes: on every rank, rows are ascending by expert."""
        num_rows = np.count_nonzero(home_E == home_E[0])
        rows_E = np.empty(len(home_E), np.int64)
        rows_E[np.argsort(home_E, kind="stable")] = np.arange(len(home_E)) % num_rows
        return cls(home_E, rows_E)

    @cached_property
    def experts_RH(self) -> Array:
        """`[R, H]`, the expert in each row of each rank."""
        return np.lexsort((self.rows_E, self.home_E)).reshape(-1, int(self.rows_E.max()) + 1)

    def moved(self, after: ExpertPlaces) -> Array:
        """The experts, ascending, that have another rank or another row in `after`."""
        return np.flatnonzero((self.home_E != after.home_E) | (self.rows_E != after.rows_E))
