"""Level three, replicas: which experts get a copy on which rank, and how many tokens each copy takes."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def place_replicas(  # type: ignore[no-untyped-def]
    counts_E, home_E, num_ranks, ranks_per_node, slots, threshold_load, smallest_share, experts_P, ranks_P, shares_P
):
    """Bring the busiest rank of one instance down to the threshold.

    The busiest rank gives tokens of its largest expert to the emptiest rank that has room, on its own node if one
    there can take a whole smallest share, until no rank is above the threshold or nothing more can move. Both sides
    move toward the mean load, never past it. (Our own; UltraEP and LLEP spill in the same spirit.)

    Args:
        counts_E: `[E]` int64 tokens of every expert.
        home_E: `[E]` int16.
        threshold_load: load at which a rank is left alone, tokens.
        smallest_share: fewest tokens that a copy may be given, or that may stay at home.
        experts_P, ranks_P, shares_P: `[R * slots]` int64, filled with the replicas.

    Returns:
        The number of replicas.
    """
    num_experts = len(counts_E)
    loads = np.zeros(num_ranks, np.int64)
    for e in range(num_experts):
        loads[home_E[e]] += counts_E[e]
    total = loads.sum()
    mean_load = (total + num_ranks - 1) // num_ranks
    at_home_E = counts_E.copy()
    free_slots = np.full(num_ranks, slots, np.int64)
    given_up = np.zeros(num_ranks, np.bool_)
    num_replicas = 0
    while True:
        giver = -1
        for r in range(num_ranks):
            if not given_up[r] and loads[r] > threshold_load and (giver < 0 or loads[r] > loads[giver]):
                giver = r
        if giver < 0:
            return num_replicas
        moved = np.int64(0)
        taker = _emptiest(loads, free_slots, mean_load - smallest_share, giver, ranks_per_node, True)
        if taker < 0:
            taker = _emptiest(loads, free_slots, mean_load - smallest_share, giver, ranks_per_node, False)
        if taker >= 0:
            wanted = min(loads[giver] - mean_load, mean_load - loads[taker])
            chosen, share = _expert_to_share(
                at_home_E, home_E, giver, taker, wanted, smallest_share, experts_P, ranks_P, num_replicas
            )
            if chosen >= 0:
                experts_P[num_replicas] = chosen
                ranks_P[num_replicas] = taker
                shares_P[num_replicas] = share
                num_replicas += 1
                free_slots[taker] -= 1
                at_home_E[chosen] -= share
                loads[giver] -= share
                loads[taker] += share
                moved = share
        if moved == 0:
            given_up[giver] = True


@numba.njit(cache=True, nogil=True)
def _emptiest(loads, free_slots, highest_load, giver, ranks_per_node, same_node):  # type: ignore[no-untyped-def]
    best = -1
    for r in range(len(loads)):
        if r == giver or free_slots[r] == 0 or loads[r] > highest_load:
            continue
        if same_node and r // ranks_per_node != giver // ranks_per_node:
            continue
        if best < 0 or loads[r] < loads[best]:
            best = r
    return best


@numba.njit(cache=True, nogil=True)
def _expert_to_share(  # type: ignore[no-untyped-def]
    at_home_E, home_E, giver, taker, wanted, smallest_share, experts_P, ranks_P, num_replicas
):
    """The expert of `giver` that can hand over most of `wanted` to `taker`, and how much; -1 if there is none."""
    chosen = -1
    most = np.int64(0)
    for e in range(len(at_home_E)):
        if home_E[e] != giver or at_home_E[e] <= most:
            continue
        share = min(wanted, at_home_E[e])
        if 0 < at_home_E[e] - share < smallest_share:
            share = at_home_E[e] - smallest_share
        if share < smallest_share or share <= most:
            continue
        has_copy = False
        for p in range(num_replicas):
            if experts_P[p] == e and ranks_P[p] == taker:
                has_copy = True
        if not has_copy:
            chosen = e
            most = share
    return chosen, most
