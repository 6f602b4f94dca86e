"""Level one, schedule: the micro-step and data rank of every sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.kernels import kernel

NOWHERE = np.int64(-1)


@dataclass(frozen=True, eq=False)
class Schedule:
    """A place for every sequence of a step. All ranks have the same number of micro-steps, M.

    Attributes:
        micro_step: `[S]` int32 in `[0, M)`.
        rank: `[S]` int32 in `[0, num_ranks)`.
        mini_batch_of_micro_step: `[M]` int32, ascending; the optimizer steps once after each mini-batch.
        num_ranks: data ranks, those of all expert-parallel groups.
    """

    micro_step: Array
    rank: Array
    mini_batch_of_micro_step: Array
    num_ranks: int

    @property
    def num_micro_steps(self) -> int:
        return len(self.mini_batch_of_micro_step)

    def of_group(self, group: int, ranks: int) -> tuple[Array, Schedule]:
        """The part of one expert-parallel group, whose ranks are data ranks from group * ranks on.

        Returns:
            Indices `[N]` of its sequences, and their schedule on the group's own ranks.
        """
        mine = np.flatnonzero(self.rank // ranks == group)
        return mine, Schedule(self.micro_step[mine], self.rank[mine] % ranks, self.mini_batch_of_micro_step, ranks)

    def sequences_of(self, rank: int) -> Array:
        """Indices of a rank's sequences, ordered by micro-step, then by index."""
        mine = np.flatnonzero(self.rank == rank)
        return mine[np.argsort(self.micro_step[mine], kind="stable")]

    def micro_steps_of(self, mini_batch: int) -> list[int]:
        """The micro-steps of a mini-batch, ascending."""
        chosen: list[int] = np.flatnonzero(self.mini_batch_of_micro_step == mini_batch).tolist()
        return chosen

    def of_rank(self, rank: int) -> Array:
        """Micro-step of each of `sequences_of(rank)`, ascending."""
        return self.micro_step[self.sequences_of(rank)]


def pack_by_length(
    lengths: npt.ArrayLike,
    *,
    num_ranks: int,
    token_budget: int,
    mini_batch: npt.ArrayLike | None = None,
) -> Schedule:
    """Pack sequences into as few micro-steps as their lengths allow, with even token counts.

    Each sequence, longest first, is assigned to the emptiest (micro-step, rank) of its mini-batch. If it does not fit,
    the mini-batch gets another micro-step. Then places of similar size are grouped, so that ranks of one micro-step
    have similar token counts.

    Args:
        lengths: `[S]` tokens of each sequence.
        token_budget: most tokens of a rank in one micro-step.
        mini_batch: `[S]` mini-batch of each sequence, from 0; all in one by default.

    Raises:
        InputError: if a sequence alone exceeds the budget, or mini-batches don't fit the sequences.
    """
    lengths = np.asarray(lengths, np.int64)
    mini_batch = np.zeros(len(lengths), np.int64) if mini_batch is None else np.asarray(mini_batch, np.int64)
    if mini_batch.shape != lengths.shape or mini_batch.min(initial=0) < 0:
        raise InputError(f"mini_batch should give each of the {len(lengths)} sequences a number of 0 or more")
    if len(lengths) and lengths.max() > token_budget:
        raise InputError(
            f"a sequence of {lengths.max()} tokens doesn't fit the token budget of {token_budget} a micro-step and "
            "rank; raise the budget"
        )
    micro_step = np.empty(len(lengths), np.int32)
    rank = np.empty(len(lengths), np.int32)
    mini_batch_of_micro_step: list[int] = []
    for batch in range(int(mini_batch.max(initial=0)) + 1):
        members = np.flatnonzero(mini_batch == batch)
        place, num_places = _fill_places(lengths[members], num_ranks, token_budget)
        micro_step[members] = len(mini_batch_of_micro_step) + place // num_ranks
        rank[members] = place % num_ranks
        mini_batch_of_micro_step += [batch] * (num_places // num_ranks)
    return Schedule(micro_step, rank, np.asarray(mini_batch_of_micro_step, np.int32), num_ranks)


def _fill_places(lengths: Array, num_ranks: int, token_budget: int) -> tuple[Array, int]:
    """A place for each sequence, numbered from the fullest down, and the number of places."""
    order = np.argsort(-lengths, kind="stable")
    micro_steps = max(1, math.ceil(int(lengths.sum()) / (num_ranks * token_budget)))
    no_limit = int(lengths.sum())
    while True:
        place = fill_emptiest(order, lengths, lengths, micro_steps * num_ranks, no_limit)
        filled = np.bincount(place, lengths, micro_steps * num_ranks).astype(np.int64)
        if filled.max(initial=0) <= token_budget:
            number = np.empty(len(filled), np.int64)
            number[np.argsort(-filled, kind="stable")] = np.arange(len(filled))
            return number[place], len(filled)
        micro_steps += 1


@kernel
def fill_emptiest(order_N, cost_N, length_N, num_places, token_budget):  # type: ignore[no-untyped-def]
    """A place `[N]` int64 for each sequence; -1 for all if one doesn't fit.

    Args:
        order_N: `[N]` int64 sequences in the order in which they are assigned.
        cost_N: `[N]` int64.
        length_N: `[N]` int64 tokens.
        num_places: number of places; among equals the first is taken.
        token_budget: most tokens of a place.
    """
    place_N = np.full(len(order_N), NOWHERE)
    tokens_P, cost_P = np.zeros(num_places, np.int64), np.zeros(num_places, np.int64)
    # Places as a heap by cost, then by number; `size` of them have not been set aside.
    heap = np.arange(num_places)
    for sequence in order_N:
        size = num_places
        while size > 0 and tokens_P[heap[0]] + length_N[sequence] > token_budget:
            size -= 1
            heap[0], heap[size] = heap[size], heap[0]
            _sift_down(heap, size, cost_P)
        if size == 0:
            place_N[:] = NOWHERE
            return place_N
        place = heap[0]
        place_N[sequence] = place
        tokens_P[place] += length_N[sequence]
        cost_P[place] += cost_N[sequence]
        _sift_down(heap, size, cost_P)
        for last in range(size, num_places):
            _sift_up(heap, last, cost_P)
    return place_N


@kernel
def _is_before(cost_P, a, b):  # type: ignore[no-untyped-def]
    return cost_P[a] < cost_P[b] or (cost_P[a] == cost_P[b] and a < b)


@kernel
def _sift_down(heap, size, cost_P):  # type: ignore[no-untyped-def]
    """Move the first of `size` places down to where it belongs."""
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _is_before(cost_P, heap[child + 1], heap[child]):
            child += 1
        if not _is_before(cost_P, heap[child], heap[at]):
            return
        heap[at], heap[child] = heap[child], heap[at]
        at = child


@kernel
def _sift_up(heap, at, cost_P):  # type: ignore[no-untyped-def]
    """Move a place up to where it belongs."""
    while at > 0 and _is_before(cost_P, heap[at], heap[(at - 1) // 2]):
        heap[at], heap[(at - 1) // 2] = heap[(at - 1) // 2], heap[at]
        at = (at - 1) // 2
