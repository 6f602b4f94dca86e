"""`MovePrice`: what moving experts costs on this machine, as measured in past moves."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.runtime.ranks.topology import Topology

# Past moves that the price is taken from.
KEPT_MOVES = 16


class MovePrice:
    """Seconds per byte that the busiest rank sends, equal on all ranks of an expert-parallel group."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._moves: deque[tuple[float, int]] = deque(maxlen=KEPT_MOVES)

    @property
    def s_per_byte(self) -> float | None:
        """The median over the bytes of past moves; None before the first.

        Bytes count, not moves, since small moves take a minimum time.
        """
        if not self._moves:
            return None
        prices, nbytes = zip(*sorted((seconds / nbytes, nbytes) for seconds, nbytes in self._moves), strict=True)
        return float(prices[np.searchsorted(np.cumsum(nbytes), sum(nbytes) / 2)])

    def measure(self, move: Callable[[], Array], device: torch.device) -> Array:
        """Measure a move of at least one expert. Collective over the ranks of the group.

        Args:
            move: returns the bytes `[R]` that each rank sent.
            device: the device of the experts.
        """
        # Opens connections and waits for the other ranks, so that the move's time includes neither.
        one_byte_R = torch.zeros(self._topology.num_ranks, dtype=torch.uint8, device=device)
        dist.all_to_all_single(torch.empty_like(one_byte_R), one_byte_R, group=self._topology.experts)
        start = _now(device)
        sent_R = move()
        slowest = torch.tensor(_now(device) - start, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._topology.expert_control)
        self._moves.append((float(slowest), int(sent_R.max())))
        return sent_R


def _now(device: torch.device) -> float:
    """Seconds, when the device has done all work so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
