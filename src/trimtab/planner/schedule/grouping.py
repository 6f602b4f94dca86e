"""Level one, grouping by routing: swap sequences between micro-steps to spread hot experts over them.

Which sequences share a micro-step is free within one optimizer step. Packing by length fixes how many micro-steps there
are and keeps the budget; swaps of sequences then reduce the work of the busiest rank of every instance, attention
included. (The idea is RoutePack's, arXiv 2608.12146; the search is our own: threshold accepting in integers.)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner.placement.placement import Placement
from trimtab.planner.schedule.schedule import Schedule
from trimtab.planner.schedule.sequence_counts import SequenceCounts

NEIGHBOURS = 48
SWAPS_PER_SEQUENCE = 800
# Most loads (of a layer and rank) that all tries read: a tenth of a second, during which training waits.
MOST_LOADS = 1 << 25
# With more rows by sequence, layer and rank than this, only some layers are used, evenly spaced.
MOST_ROWS = 1 << 26
# The search ends within this fraction of the lower bound of any grouping.
NEAR_ENOUGH = 1000


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
    experts at their homes, and of the busiest rank's attention. It never gets worse.

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
    work_S = np.zeros(sequences.num_sequences, np.int64)
    if attention_rows is not None:
        work_S = (attention_rows * rows_SLR.shape[1]).astype(np.int64)
    place_S = packed.micro_step.astype(np.int64) * packed.num_ranks + packed.rank
    mini_batch_S = packed.mini_batch_of_micro_step[packed.micro_step]
    # Sequences are ordered by mini-batch and length, so a random neighbour is a likely partner.
    order = np.lexsort((np.arange(len(place_S)), sequences.lengths, mini_batch_S))
    first_S = np.searchsorted(mini_batch_S[order], mini_batch_S[order], side="left")
    last_S = np.searchsorted(mini_batch_S[order], mini_batch_S[order], side="right")
    tries = min(swaps_per_sequence * len(order), MOST_LOADS // (rows_SLR.shape[1] * num_ranks))
    least = _least(rows_SLR, work_S, mini_batch_S, num_ranks)
    num_places = packed.num_micro_steps * packed.num_ranks
    place_S = _swap(
        rows_SLR, sequences.lengths, work_S, place_S, num_places, num_ranks, token_budget, order, first_S, last_S,
        tries, least,
    )  # fmt: skip
    return replace(
        packed,
        micro_step=(place_S // packed.num_ranks).astype(np.int32),
        rank=(place_S % packed.num_ranks).astype(np.int32),
    )


def _least(rows_SLR: Array, work_S: Array, mini_batch_S: Array, num_ranks: int) -> int:
    """Lower bound of any grouping: for every mini-batch, the total of each layer's busiest rank, and even attention."""
    least = int(work_S.sum()) // num_ranks
    for batch in np.unique(mini_batch_S):
        least += int(rows_SLR[mini_batch_S == batch].sum(axis=0, dtype=np.int64).max(axis=1).sum())
    return least


@kernel
def _swap(  # type: ignore[no-untyped-def]
    rows_SLR, lengths_S, work_S, place_S, num_places, num_ranks, token_budget, order, first_S, last_S, tries, least
):
    """Places `[S]` after the search, or the first ones if they were better.

    Threshold accepting: a swap is accepted if it costs less than a tolerance, which decreases to 0.
    """
    num_sequences, num_layers, _ = rows_SLR.shape
    num_bins = num_places // num_ranks
    first_place_S = place_S
    place_S = place_S.copy()
    filled = np.zeros(num_places, np.int64)
    work = np.zeros(num_places, np.int64)
    loads_BLR = np.zeros((num_bins, num_layers, num_ranks), np.int32)
    for s in range(num_sequences):
        filled[place_S[s]] += lengths_S[s]
        work[place_S[s]] += work_S[s]
        loads_BLR[place_S[s] // num_ranks] += rows_SLR[s]
    peaks_BL = np.empty((num_bins, num_layers), np.int64)
    for b in range(num_bins):
        for layer in range(num_layers):
            peaks_BL[b, layer] = loads_BLR[b, layer].max()
    new_peaks_2L = np.empty((2, num_layers), np.int64)
    cost = peaks_BL.sum()
    for b in range(num_bins):
        cost += _peak(work, b, num_ranks)
    first_cost = cost
    enough = least + least // NEAR_ENOUGH
    # 1/1000 of a bin's peaks, decreasing to 0 over the first three quarters of the search.
    tolerance = peaks_BL.sum() // num_bins // 1000
    steps_down = tries * 3 // 4
    random = np.uint64(0x9E3779B97F4A7C15)
    for t in range(tries):
        if cost <= enough:
            return place_S
        random ^= random << np.uint64(13)
        random ^= random >> np.uint64(7)
        random ^= random << np.uint64(17)
        at = np.int64((random >> np.uint64(33)) % np.uint64(num_sequences))
        step = np.int64((random & np.uint64(0xFFFF)) % np.uint64(2 * NEIGHBOURS)) - NEIGHBOURS
        step += step >= 0
        other = at + step
        if other < first_S[at] or other >= last_S[at]:
            continue
        i, j = order[at], order[other]
        place_i, place_j = place_S[i], place_S[j]
        bin_i, bin_j = place_i // num_ranks, place_j // num_ranks
        longer = lengths_S[j] - lengths_S[i]
        if bin_i == bin_j or filled[place_i] + longer > token_budget or filled[place_j] - longer > token_budget:
            continue
        change = np.int64(0)
        if work_S[i] != work_S[j]:
            change -= _peak(work, bin_i, num_ranks) + _peak(work, bin_j, num_ranks)
            work[place_i] += work_S[j] - work_S[i]
            work[place_j] += work_S[i] - work_S[j]
            change += _peak(work, bin_i, num_ranks) + _peak(work, bin_j, num_ranks)
        for layer in range(num_layers):
            peak_i = np.int32(0)
            peak_j = np.int32(0)
            for r in range(num_ranks):
                moved = rows_SLR[j, layer, r] - rows_SLR[i, layer, r]
                peak_i = max(peak_i, loads_BLR[bin_i, layer, r] + moved)
                peak_j = max(peak_j, loads_BLR[bin_j, layer, r] - moved)
            new_peaks_2L[0, layer] = peak_i
            new_peaks_2L[1, layer] = peak_j
            change += peak_i + peak_j - peaks_BL[bin_i, layer] - peaks_BL[bin_j, layer]
        if change > 0 and (t >= steps_down or change > tolerance - tolerance * t // steps_down):
            work[place_i] -= work_S[j] - work_S[i]
            work[place_j] -= work_S[i] - work_S[j]
            continue
        loads_BLR[bin_i] += rows_SLR[j] - rows_SLR[i]
        loads_BLR[bin_j] += rows_SLR[i] - rows_SLR[j]
        peaks_BL[bin_i] = new_peaks_2L[0]
        peaks_BL[bin_j] = new_peaks_2L[1]
        filled[place_i] += longer
        filled[place_j] -= longer
        place_S[i], place_S[j] = place_j, place_i
        cost += change
    return place_S if cost < first_cost else first_place_S


@kernel
def _peak(work, own, num_ranks):  # type: ignore[no-untyped-def]
    return work[own * num_ranks : (own + 1) * num_ranks].max()
