"""`RequestedCounts`: the rank that plans gets the rows of all ranks of its group for some layers at a time."""

from __future__ import annotations

import threading

import numpy as np
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.planner import Workload
from trimtab.runtime.rank_load import RankLoad

# Most bytes of a message round to the rank that plans, apart from one micro-step's.
ROUND_BYTES = 1 << 26


class RequestedCounts:
    """Counts of one step in an expert-parallel group. The first rank calls `count` and at last `end`, others `serve`.

    Args:
        load: of this rank.
    """

    def __init__(self, load: RankLoad) -> None:
        self._load = load
        self._group = load.topology.expert_control
        self._lock = threading.Lock()

    def count(self, micro_steps: Array, layers: Array) -> Workload:
        """The load of some micro-steps and layers, ascending `[N]` integers each. From any thread."""
        with self._lock:
            wanted_M, wanted_L = (np.isin(np.arange(most), chosen) for most, chosen in zip(
                self._load.unknown_ML.shape, (micro_steps, layers), strict=True
            ))  # fmt: skip
            self._broadcast(np.concatenate([[True], wanted_M, wanted_L]))
            found = self._gather(micro_steps, layers)
        assert found is not None
        return found

    def serve(self) -> None:
        """Answer requests until `end`."""
        num_micro_steps, num_layers = self._load.unknown_ML.shape
        while (request := self._broadcast(np.zeros(1 + num_micro_steps + num_layers, bool)))[0]:
            wanted_M, wanted_L = request[1 : 1 + num_micro_steps], request[1 + num_micro_steps :]
            self._gather(np.flatnonzero(wanted_M), np.flatnonzero(wanted_L))

    def end(self) -> None:
        """Tell the other ranks that there are no more requests."""
        with self._lock:
            self._broadcast(np.zeros(1 + sum(self._load.unknown_ML.shape), bool))

    def _broadcast(self, request: Array) -> Array:
        dist.broadcast(torch.from_numpy(request), group=self._group, group_src=0)
        return request

    def _gather(self, micro_steps: Array, layers: Array) -> Workload | None:
        """On the first rank the load of all ranks. In rounds, so that it is in memory little more than once."""
        load, is_first, ranks = self._load, self._load.topology.rank == 0, self._load.topology.num_ranks
        experts = load.counts_MLE.shape[2]
        shape = len(micro_steps), len(layers), ranks if is_first else 0
        counts_MLRE, unknown_MLR = np.empty((*shape, experts), np.int32), np.empty(shape, np.int32)
        step = max(1, ROUND_BYTES // (4 * ranks * max(1, len(layers)) * (experts + 1)))
        for start in range(0, len(micro_steps), step):
            mine = slice(start, start + step)
            chosen = np.ix_(micro_steps[mine], layers)
            rows_MLF = np.concatenate([load.counts_MLE[chosen], load.unknown_ML[chosen][:, :, None]], axis=2)
            rows_RMLF = np.empty((shape[2], *rows_MLF.shape), np.int32)
            parts = [*torch.from_numpy(rows_RMLF)] if is_first else None
            dist.gather(torch.from_numpy(rows_MLF), parts, group=self._group, group_dst=0)
            counts_MLRE[mine] = rows_RMLF[..., :-1].transpose(1, 2, 0, 3)
            unknown_MLR[mine] = rows_RMLF[..., -1].transpose(1, 2, 0)
        return Workload(counts_MLRE, unknown_MLR) if is_first else None
