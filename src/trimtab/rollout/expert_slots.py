"""`ExpertSlots`: the experts of every expert rank, copies of hot ones among them, and the slot that a token uses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.placement.serving_placement import fill_slots


@dataclass(frozen=True, eq=False)
class ExpertSlots:
    """A placement of E experts on X expert ranks.

    Attributes:
        slots_LXS: `[L, X, S]` int64, the expert in each slot of each rank.
        num_experts: E.
    """

    slots_LXS: Array
    num_experts: int

    @classmethod
    def place(cls, counts_LE: Array, num_ranks: int, copies: int) -> ExpertSlots:
        """Experts and copies of hot ones, placed by the planner.

        Args:
            counts_LE: `[L, E]` tokens of each expert; all 0 if they are not known.
            num_ranks: X.
            copies: slots of a rank beside its E / X; none are used with one rank.

        Raises:
            InputError: if the ranks don't divide the experts.
        """
        num_layers, num_experts = counts_LE.shape
        if num_ranks == 1:
            return cls(np.broadcast_to(np.arange(num_experts), (num_layers, 1, num_experts)).copy(), num_experts)
        counts_LE = counts_LE if counts_LE.any() else np.ones_like(counts_LE)
        slots_LP = fill_slots(counts_LE[None], num_experts + copies * num_ranks, num_ranks, num_ranks)
        return cls(slots_LP.reshape(num_layers, num_ranks, -1), num_experts)

    def replaced(self, before: ExpertSlots) -> int:
        """Experts that a rank has here and did not have before, over all ranks and layers."""
        ranks, ranks_before = (slots.slots_LXS.reshape(-1, slots.slots_LXS.shape[2]) for slots in (self, before))
        return sum(len(np.setdiff1d(*held)) for held in zip(ranks, ranks_before, strict=True))

    def assign(self, layer: int, ids_TK: Array) -> Array:
        """Slots `[T, K]` of tokens' experts, numbered over all ranks; -1 where an id is negative.

        Tokens of an expert with copies go, one after another, to the copy whose rank has the least load, most frequent
        experts first. Load is the number of choices in this call.
        """
        slot_TK = np.append(self._first_LE[layer], -1)[ids_TK]
        copied = self._copied_L[layer]
        if not copied:
            return slot_TK
        counts_E = np.bincount(ids_TK[ids_TK >= 0], minlength=self.num_experts)
        fixed_E = counts_E.copy()
        fixed_E[list(copied)] = 0
        num_ranks, slots_per_rank = self.slots_LXS.shape[1:]
        load_X = np.bincount(self._first_LE[layer] // slots_per_rank, fixed_E, num_ranks).astype(np.int64)
        for expert in sorted(copied, key=lambda each: -counts_E[each]):
            slots = copied[expert]
            ranks = slots // slots_per_rank
            tokens_C = fill_evenly(load_X[ranks], int(counts_E[expert]))
            slot_TK[ids_TK == expert] = np.repeat(slots, tokens_C)
            load_X[ranks] += tokens_C
        return slot_TK

    @cached_property
    def _first_LE(self) -> Array:
        """A slot of each expert."""
        flat_LP = self.slots_LXS.reshape(len(self.slots_LXS), -1)
        return np.stack([np.unique(slots, return_index=True)[1] for slots in flat_LP])

    @cached_property
    def _copied_L(self) -> list[dict[int, Array]]:
        """For each layer, the experts that are on several ranks, with a slot on each."""
        copied = []
        for slots_XS in self.slots_LXS:
            found: dict[int, dict[int, int]] = {}
            for slot, expert in enumerate(slots_XS.flat):
                found.setdefault(int(expert), {}).setdefault(slot // slots_XS.shape[1], slot)
            copied.append({expert: np.array([*of.values()]) for expert, of in found.items() if len(of) > 1})
        return copied


def fill_evenly(loads_C: Array, count: int) -> Array:
    """How many of `count` tokens each of C ranks gets, if each token goes to the rank with the least load."""
    level = np.min(-(-(count + np.cumsum(np.sort(loads_C))) // np.arange(1, len(loads_C) + 1)))
    tokens_C: Array = np.maximum(level - 1 - loads_C, 0)
    last = np.flatnonzero(loads_C < level)[: count - tokens_C.sum()]
    tokens_C[last] += 1
    return tokens_C
