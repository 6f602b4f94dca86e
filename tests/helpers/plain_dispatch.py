"""A dispatcher that uses ids only: every rank gathers all tokens, and selects those of its physical experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.nn.functional import all_reduce

from trimtab.runtime import RowGroups
from trimtab.runtime.layer.dispatch import Dispatched
from trimtab.runtime.layer.layer_call import LayerCall


class PlainDispatcher:
    """Dispatch and combine by all-reduce.

    Args:
        group: returns the expert-parallel group, which a session may make anew.
        num_homes, num_slots: of a rank, H and S.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup], num_homes: int, num_slots: int) -> None:
        self._group = group
        self.num_homes, self.num_local = num_homes, num_homes + num_slots

    @property
    def group(self) -> dist.ProcessGroup:
        """The expert-parallel group."""
        return self._group()

    def dispatch(
        self, hidden: torch.Tensor, physical_ids: torch.Tensor, weights: torch.Tensor, call: LayerCall
    ) -> Dispatched:
        most = torch.tensor(len(hidden))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        length = int(most)
        ids_NK = physical_ids.to(torch.int64) + 1
        hidden_T, weights_TK, ids_TK = (self._gathered(t, length) for t in (hidden, weights, ids_NK))
        rank = dist.get_rank(self.group)
        first, mine = rank * self.num_local, slice(rank * length, rank * length + len(hidden))
        rows, counts = [], []
        for expert in range(first, first + self.num_local):
            rows.append((ids_TK == expert + 1).nonzero())
            counts.append(len(rows[-1]))
        places = torch.cat(rows)
        at_home = sum(counts[: self.num_homes])
        arrived = hidden_T[places[:, 0]]
        used = len(call.layout.replica_groups.counts)
        assert sum(counts[self.num_homes + used :]) == 0, "rows for a slot without a replica"
        return Dispatched(
            arrived[:at_home], arrived[at_home:],
            RowGroups.of(counts[: self.num_homes], hidden.device),
            RowGroups.of(counts[self.num_homes : self.num_homes + used], hidden.device),
            (places, weights_TK[places[:, 0], places[:, 1]], len(hidden_T), mine),
        )  # fmt: skip

    def combine(self, outputs: Sequence[torch.Tensor], dispatched: Dispatched) -> torch.Tensor:
        places, weights, num_all, mine = dispatched.state
        rows = torch.cat([*outputs])
        part = rows.new_zeros(num_all, rows.shape[1]).index_add(0, places[:, 0], rows * weights.to(rows.dtype)[:, None])
        whole: torch.Tensor = all_reduce(part, group=self.group)
        return whole[mine]

    def _gathered(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        """All ranks' `[n, K]`, each padded to `length`."""
        first = dist.get_rank(self.group) * length
        after = dist.get_world_size(self.group) * length - first - len(tensor)
        whole: torch.Tensor = all_reduce(F.pad(tensor, (0, 0, first, after)), group=self.group)
        return whole
