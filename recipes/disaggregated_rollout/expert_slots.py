"""`ExpertSlots`: the experts of every expert rank, copies of hot ones among them, and the slot that a token uses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner.placement.serving_placement import fill_slots


@dataclass(frozen=True, eq=False)
class ExpertSlots:
    """A placement of E experts on X expert ranks.

    Attributes:
        slots_LXS: `[L, X, S]` int64, the expert in each slot of each rank.
        copies_LEX: `[L, E, X]` int64, a slot of each expert on each rank; -1 where it has none.
    """

    slots_LXS: Array
    copies_LEX: Array

    @classmethod
    def place(cls, counts_LE: Array, num_ranks: int, copies: int) -> ExpertSlots:
        """Experts and copies of hot ones, placed by the planner.

        Args:
            counts_LE: `[L, E]` tokens of each expert; all 0 if they are not known.
            num_ranks: X, which divides E.
            copies: slots of a rank beside its E / X, of which it uses no more than there are other experts.
        """
        num_layers, num_experts = counts_LE.shape
        copies = min(copies, num_experts - num_experts // num_ranks)
        counts_LE = counts_LE if counts_LE.any() else np.ones_like(counts_LE)
        slots_LP = fill_slots(counts_LE[None], num_experts + copies * num_ranks, num_ranks, num_ranks)
        slots_LXS = slots_LP.reshape(num_layers, num_ranks, -1)
        layers, ranks, slots = np.indices(slots_LXS.shape)
        copies_LEX = np.full((num_layers, num_experts, num_ranks), -1)
        copies_LEX[layers, slots_LXS, ranks] = slots
        return cls(slots_LXS, copies_LEX)

    def replaced(self, before: ExpertSlots) -> int:
        """Experts that a rank has here and did not have before, over all ranks and layers."""
        return int(np.count_nonzero((self.copies_LEX >= 0) & (before.copies_LEX < 0)))

    def assign(self, layer: int, ids_TK: Array, first: int = 0) -> tuple[Array, Array]:
        """Ranks `[T, K]` of tokens' experts, and slots there; both -1 where an id is negative.

        Each token of an expert with copies goes to the copy whose rank has the least load, after all tokens of experts
        without. Load is the number of choices in this call; of ranks with equal loads, the next from `first` on.
        """
        rank_TK, slot_TK = np.full((2, *ids_TK.shape), -1)
        _assign(ids_TK, self.copies_LEX[layer], first, rank_TK, slot_TK)
        return rank_TK, slot_TK


@kernel
def _assign(ids_TK, copies_EX, first, rank_TK, slot_TK):  # type: ignore[no-untyped-def]
    """Choose for experts with one copy, then for those with more."""
    num_ranks = copies_EX.shape[1]
    load_X = np.zeros(num_ranks, np.int64)
    for is_copied in (False, True):
        for t in range(ids_TK.shape[0]):
            for k in range(ids_TK.shape[1]):
                expert = ids_TK[t, k]
                if expert < 0 or ((copies_EX[expert] >= 0).sum() > 1) != is_copied:
                    continue
                best = -1
                for i in range(num_ranks):
                    rank = (first + i) % num_ranks
                    if copies_EX[expert, rank] >= 0 and (best < 0 or load_X[rank] < load_X[best]):
                        best = rank
                load_X[best] += 1
                rank_TK[t, k], slot_TK[t, k] = best, copies_EX[expert, best]
