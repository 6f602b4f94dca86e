"""`fill_shared_rows`: which rank computes the shared experts of every source's tokens, as SGLang's Waterfill does.

Every rank has the weights of the shared experts, so a token's shared experts can be computed as one more row on another
rank. Waterfill (SGLang, pull request 19290) gives this row to a rank with little load among those that the token is
sent to anyway, and the token's own rank.
"""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts
from trimtab.kernels import kernel

# Halvings of the interval of levels, down to the precision of float64.
HALVINGS = 52
# Levels that differ by less, relatively, are equal.
ROUNDING = 1e-12


def fill_shared_rows(
    seconds_R: Array, tokens_R: Array, rows_RR: Array, costs: OperationCosts, ranks_per_node: int
) -> Array:
    """Tokens of every source whose shared experts each rank computes, `[R, R]` int64, by source and rank.

    The seconds of the busiest rank are the least that are possible. At this level a source keeps what its own rank has
    time for, and other ranks of its node come before those of other nodes.

    Args:
        seconds_R: `[R]` float64, forward of the routed experts of each rank.
        tokens_R: `[R]` int64 tokens of each source.
        rows_RR: `[R, R]` int64 rows of each source for routed experts on each rank. They are of at most as many tokens,
            so at most as many shared rows go there; counts tell no more.
    """
    most_RR = np.minimum(rows_RR, tokens_R[:, None])
    np.fill_diagonal(most_RR, tokens_R)
    # With every token on its own rank.
    high = float((seconds_R + costs.shared_seconds(tokens_R)).max())
    filled_RR = np.zeros_like(most_RR)
    shared = costs.copy_s, costs.tile_rows * costs.shared_token_s, costs.tile_rows
    _fill(seconds_R, most_RR, high, shared, ranks_per_node, filled_RR)
    return filled_RR


@kernel
def _fill(seconds_R, most_RR, high, shared, per_node, filled_RR):  # type: ignore[no-untyped-def]
    """Fills ranks to the lowest level at which all tokens have a place; `high` is such a level."""
    room_R, total = np.empty(len(seconds_R), np.int64), np.int64(0)
    for r in range(len(seconds_R)):
        total += most_RR[r, r]
    # No level below this one has room for all tokens.
    low, least = seconds_R.max(), high
    if _find_room(low, seconds_R, total, shared, room_R) >= total:
        least = low
    for _ in range(HALVINGS):
        middle = 0.5 * (low + least)
        if _find_room(middle, seconds_R, total, shared, room_R) >= total:
            least = middle
        else:
            low = middle
    _find_room(least, seconds_R, total, shared, room_R)
    if _assign(most_RR, room_R, per_node, filled_RR):
        return
    # Tokens don't go to all ranks with room.
    low = least
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        _find_room(middle, seconds_R, total, shared, room_R)
        if _assign(most_RR, room_R, per_node, filled_RR):
            high = middle
        else:
            low = middle
    _find_room(high, seconds_R, total, shared, room_R)
    _assign(most_RR, room_R, per_node, filled_RR)


@kernel
def _find_room(level, seconds_R, total, shared, room_R):  # type: ignore[no-untyped-def]
    """Sets `room_R` to the shared rows that each rank can compute until `level`, at most `total`; returns their sum."""
    copy_s, tile_s, tile_rows = shared
    rooms = np.int64(0)
    for r in range(len(seconds_R)):
        spare_s, room_R[r] = level * (1 + ROUNDING) - seconds_R[r] - copy_s, 0
        if spare_s >= 0.0:
            tiles = spare_s / tile_s if spare_s < tile_s * total else float(total)
            room_R[r] = min(total, np.int64(tiles) * tile_rows)
        rooms += room_R[r]
    return rooms


@kernel
def _assign(most_RR, room_R, per_node, filled_RR):  # type: ignore[no-untyped-def]
    """Assigns every source's tokens to ranks with room, which `room_R` then lacks; returns whether all have a place."""
    ranks = len(room_R)
    left_R = np.empty(ranks, np.int64)
    filled_RR[:] = 0
    for r in range(ranks):
        filled_RR[r, r] = min(most_RR[r, r], room_R[r])
        left_R[r] = most_RR[r, r] - filled_RR[r, r]
        room_R[r] -= filled_RR[r, r]
    for same_node in (True, False):
        for source in range(ranks):
            for i in range(1, ranks):
                rank = (source + i) % ranks
                if (rank // per_node == source // per_node) == same_node:
                    rows = min(left_R[source], room_R[rank], most_RR[source, rank])
                    filled_RR[source, rank] = rows
                    left_R[source] -= rows
                    room_R[rank] -= rows
    while left_R.max() > 0:
        if not _move_along_path(most_RR, left_R, room_R, filled_RR):
            return False
    return True


@kernel
def _move_along_path(most_RR, left_R, room_R, filled_RR):  # type: ignore[no-untyped-def]
    """Assigns more tokens where sources give way to each other (an augmenting path); returns whether that is possible.

    A source takes the room that another one has on a rank, and that one takes room elsewhere, up to a rank with room.
    """
    ranks = len(left_R)
    # The source that would get room on a rank, and the rank on which a source would lose it; -1: not reached.
    source_of, rank_of = np.full(ranks, -1), np.full(ranks, -1)
    queue, first, last = np.empty(ranks, np.int64), 0, 0
    is_queued = left_R > 0
    for source in range(ranks):
        if is_queued[source]:
            queue[last] = source
            last += 1
    while first < last:
        source = queue[first]
        first += 1
        for rank in range(ranks):
            if source_of[rank] >= 0 or filled_RR[source, rank] >= most_RR[source, rank]:
                continue
            source_of[rank] = source
            if room_R[rank] > 0:
                _move(rank, source_of, rank_of, most_RR, left_R, room_R, filled_RR)
                return True
            for other in range(ranks):
                if not is_queued[other] and filled_RR[other, rank] > 0:
                    is_queued[other] = True
                    rank_of[other] = rank
                    queue[last] = other
                    last += 1
    return False


@kernel
def _move(end, source_of, rank_of, most_RR, left_R, room_R, filled_RR):  # type: ignore[no-untyped-def]
    """Moves as many tokens as possible along the path that ends at rank `end`."""
    rank, rows = end, room_R[end]
    while True:
        source = source_of[rank]
        rows = min(rows, most_RR[source, rank] - filled_RR[source, rank])
        rank = rank_of[source]
        if rank < 0:
            break
        rows = min(rows, filled_RR[source, rank])
    rows = min(rows, left_R[source])
    room_R[end] -= rows
    left_R[source] -= rows
    rank = end
    while rank >= 0:
        source = source_of[rank]
        filled_RR[source, rank] += rows
        rank = rank_of[source]
        if rank >= 0:
            filled_RR[source, rank] -= rows
