"""Grouping by routing, the first level of the planner (docs/planning.md): sequences are swapped between micro-steps.

Within one optimizer step, sequences may be assigned to any micro-step. The length-packed schedule sets the number of
micro-steps and respects the token budget. Swapping sequences between its micro-steps then reduces the work of the
busiest rank of every instance, attention included. (The idea is RoutePack's, arXiv 2608.12146; the search is our own:
threshold accepting in integers.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner.placement.placement import Placement
from trimtab.planner.schedule.schedule import Schedule
from trimtab.planner.schedule.sequence_counts import SequenceCounts

NEIGHBOURS = 48
SWAPS_PER_SEQUENCE = 800
# Maximum number of load values, one per try, layer and rank, that the search reads. It limits the search to about
# 0.1 s, which delays training.
MOST_LOADS = 1 << 25
# With more rows by sequence, layer and rank than this, only some layers are used, evenly spaced.
MOST_ROWS = 1 << 26
# The search stops when the cost is at most lower bound * (1 + 1/STOP_GAP).
STOP_GAP = 1000


class SwapPool(NamedTuple):
    """Sequences, sorted so that near neighbours are swap candidates.

    Attributes:
        rows_SLR: `[S, L, R]` int32 rows by layer and home rank.
        lengths_S: `[S]` int64 tokens.
        attention_S: `[S]` int64, attention time of each sequence over all layers, in expert rows with the same time.
        order: `[S]` int64 sequences by mini-batch and length.
        first_S: `[S]` int64, the first position in `order` of the mini-batch at each position.
        last_S: `[S]` int64, the last position plus one.
    """

    rows_SLR: Array
    lengths_S: Array
    attention_S: Array
    order: Array
    first_S: Array
    last_S: Array


class SwapLimits(NamedTuple):
    """Limits of the search, all int64.

    Attributes:
        num_places: micro-steps times data ranks.
        token_budget: most tokens of a place.
        tries: swaps that are tried.
        least_cost: lower bound of any grouping.
    """

    num_places: int
    token_budget: int
    tries: int
    least_cost: int


class GroupLoads(NamedTuple):
    """Loads of places and bins.

    A place is one data rank in one micro-step; a bin is the R places of one expert-parallel group in one micro-step.

    Attributes:
        tokens_P: `[P]` int64 tokens of each place.
        attention_P: `[P]` int64, attention time of each place, in expert rows.
        rows_BLR: `[B, L, R]` int32 rows of each bin.
        peaks_BL: `[B, L]` int64 rows of the bin's busiest rank.
    """

    tokens_P: Array
    attention_P: Array
    rows_BLR: Array
    peaks_BL: Array


def group_by_routing(
    sequences: SequenceCounts,
    packed: Schedule,
    placement: Placement,
    token_budget: int,
    *,
    num_groups: int = 1,
    attention_rows: Array | None = None,
    swaps_per_sequence: int = SWAPS_PER_SEQUENCE,
) -> Schedule:
    """Returns a schedule with the places of `packed` and sequences swapped within mini-batches.

    The objective is the sum over micro-steps, expert-parallel groups and layers of the rows of the busiest rank, all
    experts at their homes, and of the busiest rank's attention. The result never costs more than `packed`.

    Args:
        packed: places for all sequences of `num_groups * R` data ranks; data rank d is rank d % R of group d // R.
        placement: homes on the R ranks of one group.
        token_budget: most tokens of a place.
        attention_rows: `[S]` attention of each sequence in one layer, as the number of expert rows with the same time;
            default none.
        swaps_per_sequence: swaps tried per sequence.
    """
    num_ranks = packed.num_ranks // num_groups
    if sequences.num_sequences < 2 or packed.num_micro_steps * num_groups < 2:
        return packed
    stride = -(-sequences.num_layers * sequences.num_sequences * num_ranks // MOST_ROWS)
    layers = np.arange(0, sequences.num_layers, stride)
    rows_SLR = sequences.rows_by_place(placement.home, num_ranks, layers)
    attention_S = np.zeros(sequences.num_sequences, np.int64)
    if attention_rows is not None:
        attention_S = (attention_rows * rows_SLR.shape[1]).astype(np.int64)
    place_S = packed.micro_step.astype(np.int64) * packed.num_ranks + packed.rank
    mini_batch_S = packed.mini_batch_of_micro_step[packed.micro_step]
    # Sequences are ordered by mini-batch and length, so a random neighbour is a likely partner.
    order = np.lexsort((np.arange(len(place_S)), sequences.lengths, mini_batch_S))
    first_S = np.searchsorted(mini_batch_S[order], mini_batch_S[order], side="left")
    last_S = np.searchsorted(mini_batch_S[order], mini_batch_S[order], side="right")
    tries = min(swaps_per_sequence * len(order), MOST_LOADS // (rows_SLR.shape[1] * num_ranks))
    least = _least(rows_SLR, attention_S, mini_batch_S, num_ranks)
    num_places = packed.num_micro_steps * packed.num_ranks
    pool = SwapPool(rows_SLR, sequences.lengths, attention_S, order, first_S, last_S)
    place_S = _swap(pool, place_S, SwapLimits(num_places, token_budget, tries, least))
    return replace(
        packed,
        micro_step=(place_S // packed.num_ranks).astype(np.int32),
        rank=(place_S % packed.num_ranks).astype(np.int32),
    )


def _least(rows_SLR: Array, attention_S: Array, mini_batch_S: Array, num_ranks: int) -> int:
    """A lower bound of the cost of any grouping.

    The rows of the busiest rank are summed over mini-batches and layers as if each mini-batch were one micro-step of
    one expert-parallel group; the attention is divided evenly over R ranks.
    """
    least = int(attention_S.sum()) // num_ranks
    for batch in np.unique(mini_batch_S):
        least += int(rows_SLR[mini_batch_S == batch].sum(axis=0, dtype=np.int64).max(axis=1).sum())
    return least


@kernel
def _swap(pool, first_place_S, limits):  # type: ignore[no-untyped-def]
    """Places `[S]` after the search, or the first ones if they were no worse.

    Threshold accepting: a swap is accepted if it costs less than a tolerance, which decreases to 0.
    """
    rows_SLR, lengths_S, attention_S, order, first_S, last_S = pool
    num_sequences, num_layers, num_ranks = rows_SLR.shape
    place_S = first_place_S.copy()
    loads = _count_loads(pool, place_S, limits.num_places)
    tokens_P, attention_P, rows_BLR, peaks_BL = loads
    new_peaks_2L = np.empty((2, num_layers), np.int64)
    peaks = np.int64(0)
    attention = np.int64(0)
    for b in range(len(peaks_BL)):
        for layer in range(num_layers):
            peaks += peaks_BL[b, layer]
        attention += _busiest(attention_P, b, num_ranks)
    cost = first_cost = peaks + attention
    enough = limits.least_cost + limits.least_cost // STOP_GAP
    # 1/1000 of a bin's peaks, decreasing to 0 over the first three quarters of the search.
    tolerance = peaks // len(peaks_BL) // 1000
    steps_down = limits.tries * 3 // 4
    random = np.uint64(0x9E3779B97F4A7C15)
    for t in range(limits.tries):
        if cost <= enough:
            break
        random ^= random << np.uint64(13)
        random ^= random >> np.uint64(7)
        random ^= random << np.uint64(17)
        at = np.int64((random >> np.uint64(33)) % np.uint64(num_sequences))
        step = np.int64((random & np.uint64(0xFFFF)) % np.uint64(2 * NEIGHBOURS)) - NEIGHBOURS
        other = at + step + (step >= 0)
        if other < first_S[at] or other >= last_S[at]:
            continue
        i, j = order[at], order[other]
        a, b = place_S[i], place_S[j]
        longer = lengths_S[j] - lengths_S[i]
        if (
            a // num_ranks == b // num_ranks
            or tokens_P[a] + longer > limits.token_budget
            or tokens_P[b] - longer > limits.token_budget
        ):
            continue
        heavier = attention_S[j] - attention_S[i]
        change = np.int64(0)
        if heavier != 0:
            change -= _busiest(attention_P, a // num_ranks, num_ranks) + _busiest(
                attention_P, b // num_ranks, num_ranks
            )
            attention_P[a] += heavier
            attention_P[b] -= heavier
            change += _busiest(attention_P, a // num_ranks, num_ranks) + _busiest(
                attention_P, b // num_ranks, num_ranks
            )
        change += _find_peaks(rows_SLR[i], rows_SLR[j], loads, (a // num_ranks, b // num_ranks), new_peaks_2L)
        if change > 0 and (t >= steps_down or change > tolerance - tolerance * t // steps_down):
            attention_P[a] -= heavier
            attention_P[b] += heavier
            continue
        for layer in range(num_layers):
            for r in range(num_ranks):
                moved = rows_SLR[j, layer, r] - rows_SLR[i, layer, r]
                rows_BLR[a // num_ranks, layer, r] += moved
                rows_BLR[b // num_ranks, layer, r] -= moved
            peaks_BL[a // num_ranks, layer] = new_peaks_2L[0, layer]
            peaks_BL[b // num_ranks, layer] = new_peaks_2L[1, layer]
        tokens_P[a] += longer
        tokens_P[b] -= longer
        place_S[i], place_S[j] = b, a
        cost += change
    return place_S if cost < first_cost else first_place_S


@kernel
def _count_loads(pool, place_S, num_places):  # type: ignore[no-untyped-def]
    """`GroupLoads` of the sequences at their places."""
    rows_SLR, lengths_S, attention_S, _, _, _ = pool
    num_sequences, num_layers, num_ranks = rows_SLR.shape
    num_bins = num_places // num_ranks
    tokens_P, attention_P = np.zeros(num_places, np.int64), np.zeros(num_places, np.int64)
    rows_BLR = np.zeros((num_bins, num_layers, num_ranks), np.int32)
    peaks_BL = np.zeros((num_bins, num_layers), np.int64)
    for s in range(num_sequences):
        b = place_S[s] // num_ranks
        tokens_P[place_S[s]] += lengths_S[s]
        attention_P[place_S[s]] += attention_S[s]
        for layer in range(num_layers):
            for r in range(num_ranks):
                rows_BLR[b, layer, r] += rows_SLR[s, layer, r]
    for b in range(num_bins):
        for layer in range(num_layers):
            for r in range(num_ranks):
                peaks_BL[b, layer] = max(peaks_BL[b, layer], rows_BLR[b, layer, r])
    return GroupLoads(tokens_P, attention_P, rows_BLR, peaks_BL)


@kernel
def _find_peaks(rows_i_LR, rows_j_LR, loads, bins, new_peaks_2L):  # type: ignore[no-untyped-def]
    """Peaks of two bins if sequence i of the first and j of the second are swapped; returns the change of their sum."""
    bin_i, bin_j = bins
    rows_BLR, peaks_BL = loads.rows_BLR, loads.peaks_BL
    change = np.int64(0)
    for layer in range(rows_i_LR.shape[0]):
        peak_i = np.int32(0)
        peak_j = np.int32(0)
        for r in range(rows_i_LR.shape[1]):
            moved = rows_j_LR[layer, r] - rows_i_LR[layer, r]
            peak_i = max(peak_i, rows_BLR[bin_i, layer, r] + moved)
            peak_j = max(peak_j, rows_BLR[bin_j, layer, r] - moved)
        new_peaks_2L[0, layer] = peak_i
        new_peaks_2L[1, layer] = peak_j
        change += peak_i + peak_j - peaks_BL[bin_i, layer] - peaks_BL[bin_j, layer]
    return change


@kernel
def _busiest(attention_P, bin_index, num_ranks):  # type: ignore[no-untyped-def]
    """The largest attention of the places of a bin."""
    most = np.int64(0)
    for place in range(bin_index * num_ranks, (bin_index + 1) * num_ranks):
        most = max(most, attention_P[place])
    return most
