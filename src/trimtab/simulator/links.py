"""Links: completion times of transfers that share a rank's link with other transfers and with all-to-alls.

A lane is one direction of one link of one rank. Its transfers are processed one after another, each at the link's full
rate without an all-to-all on the lane, and at the remaining rate during one. A transfer between two ranks is complete
when both lanes have processed it. All-to-alls have priority and are not slowed down. The completion time of a transfer
is computed when it is first needed, with the all-to-alls up to then. This is exact except for the gradients of replicas
of one instance: all-to-alls that begin after these were sent do not slow them down.

Weights and gradients have separate lanes; a rank that sends both at the same time is not modelled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel

# Lanes of weights, and of gradients in the other direction: out of the replica's rank, into the home's. They are int64,
# because numba compiles a function once more for every Python int.
NEAR_OUT, NEAR_IN, FAR_OUT, FAR_IN, HOST_IN, GRADIENTS = np.arange(6)
NUM_LANES = GRADIENTS + HOST_IN
# No transfer begins before the last pass over the layers; each layer has two all-to-alls.
REMEMBERED_PASSES = 2
ALL_TO_ALLS = 2


class Links(NamedTuple):
    """Busy times of the lanes of D ranks.

    Attributes:
        free: `[lanes, D]` float64, when each lane has completed all transfers so far.
        seen: `[lanes, D]` int64, all-to-alls that each lane has passed.
        starts, near_ends, far_ends: `[H, D]` float64, the last H all-to-alls of each rank, in a ring: their beginning,
            and their end on the link inside the node and on that between nodes.
        calls: `[D]` int64, all-to-alls of each rank so far.
    """

    free: Array
    seen: Array
    starts: Array
    near_ends: Array
    far_ends: Array
    calls: Array


def idle_links(num_ranks: int, num_layers: int) -> Links:
    """Returns the lanes of `num_ranks` ranks before a step."""
    remembered = (REMEMBERED_PASSES * ALL_TO_ALLS * num_layers, num_ranks)
    return Links(
        free=np.zeros((NUM_LANES, num_ranks)),
        seen=np.zeros((NUM_LANES, num_ranks), np.int64),
        starts=np.zeros(remembered),
        near_ends=np.zeros(remembered),
        far_ends=np.zeros(remembered),
        calls=np.zeros(num_ranks, np.int64),
    )


@kernel
def occupy(links, rank, start, near_s, far_s):  # type: ignore[no-untyped-def]
    """Record the start of a rank's all-to-all, with its times inside the node and between nodes."""
    h = links.calls[rank] % len(links.starts)
    links.starts[h, rank] = start
    links.near_ends[h, rank] = start + near_s
    links.far_ends[h, rank] = start + far_s
    links.calls[rank] += 1


@kernel
def serve(links, lane, rank, release, work, spare):  # type: ignore[no-untyped-def]
    """The time when a lane has completed `work` more seconds, which start at `release` or later.

    Args:
        spare: the part of the rate that an all-to-all leaves.
    """
    between_nodes = lane in (FAR_OUT, FAR_IN, GRADIENTS + FAR_OUT, GRADIENTS + FAR_IN)
    ends = links.far_ends if between_nodes else links.near_ends
    ring, last = len(links.starts), links.calls[rank]
    time = max(links.free[lane, rank], release)
    k = last if lane == HOST_IN else max(links.seen[lane, rank], last - ring)
    while work > 0.0:
        while k < last and ends[k % ring, rank] <= time:
            k += 1
        if k == last:
            time += work
            break
        start, end = links.starts[k % ring, rank], ends[k % ring, rank]
        if time < start:
            gap = start - time
            if work <= gap:
                time += work
                break
            work -= gap
            time = start
        possible = spare * (end - time)
        if possible >= work:
            time += work / spare
            break
        work -= possible
        time = end
    links.free[lane, rank] = time
    links.seen[lane, rank] = k
    return time


@kernel
def transfer(links, lane, ends, release, work, spare):  # type: ignore[no-untyped-def]
    """The time when a transfer from rank `ends[0]`, on `lane`, to rank `ends[1]`, on the lane after it, is complete."""
    sent = serve(links, lane, ends[0], release, work, spare)
    return max(sent, serve(links, lane + 1, ends[1], release, work, spare))
