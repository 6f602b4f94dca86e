"""`ExpertPlaces`: the rank and the row of each expert of a layer.

Moves, saving, loading, optimizer state and export read the places of experts here. Each of R ranks holds H = E / R
experts, in rows 0 to H - 1. A *position* numbers the rows of all ranks: row i of rank r is position r * H + i.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trimtab.array_type import Array
from trimtab.runtime.ranks.lockstep import digest


@dataclass(frozen=True, eq=False)
class ExpertPlaces:
    """The places of all experts of one layer. A move makes another value.

    Attributes:
        home_E: `[E]` int16, the home rank of every expert; every rank has as many experts.
        rows_E: `[E]` int64, the row of every expert on its home rank.
    """

    home_E: Array
    rows_E: Array

    @classmethod
    def first(cls, home_E: Array) -> ExpertPlaces:
        """The places at the start: on every rank, rows are ascending by expert."""
        num_rows = np.count_nonzero(home_E == home_E[0])
        rows_E = np.empty(len(home_E), np.int64)
        rows_E[np.argsort(home_E, kind="stable")] = np.arange(len(home_E)) % num_rows
        return cls(home_E, rows_E)

    @cached_property
    def experts_RH(self) -> Array:
        """`[R, H]`, the expert in each row of each rank."""
        return np.lexsort((self.rows_E, self.home_E)).reshape(-1, int(self.rows_E.max()) + 1)

    @cached_property
    def by_position(self) -> Array:
        """`[E]`, the expert at each position."""
        return self.experts_RH.reshape(-1)

    @property
    def positions_E(self) -> Array:
        """`[E]` int64, the position of each expert."""
        return np.argsort(self.by_position)

    @cached_property
    def digest(self) -> str:
        """A digest of all places."""
        return digest(self.home_E.astype(np.int16), self.rows_E.astype(np.int64))

    @cached_property
    def are_first(self) -> bool:
        """Whether every expert's number is its position."""
        return bool((self.by_position == np.arange(len(self.by_position))).all())

    def rows_after(self, home_E: Array) -> Array:
        """The rows `[E]` after a move to these homes `[E]`, which have as many experts on each rank.

        Experts that arrive at a rank take the rows of those that leave it: their present row if it is among these, the
        others in ascending order of experts and of rows.
        """
        rows_E = self.rows_E.copy()
        moved_E = self.home_E != home_E
        for rank in np.unique(home_E[moved_E]).tolist():
            free = sorted(self.rows_E[moved_E & (self.home_E == rank)].tolist())
            others = []
            for expert in np.flatnonzero(moved_E & (home_E == rank)).tolist():
                if rows_E[expert] in free:
                    free.remove(rows_E[expert])
                else:
                    others.append(expert)
            rows_E[others] = free
        return rows_E

    def moved(self, after: ExpertPlaces) -> Array:
        """The experts, ascending, that have another rank or another row in `after`."""
        return np.flatnonzero((self.home_E != after.home_E) | (self.rows_E != after.rows_E))

    def with_ranks_at(self, positions: tuple[int, ...]) -> ExpertPlaces:
        """The same places with other numbers of the ranks, `positions` `[R]`."""
        return ExpertPlaces(np.array(positions, np.int16)[self.home_E], self.rows_E)
