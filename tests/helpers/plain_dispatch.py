"""A dispatcher that uses ids only: every rank gathers all tokens, and selects those of its physical experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trimtab.runtime import RowGroups
from trimtab.runtime.layer.dispatch import Dispatched
from trimtab.runtime.layer.instance import Instance


class PlainDispatcher:
    """Dispatch by all-gather, combine by all-reduce.

    Args:
        group: the ranks of the expert-parallel group.
        num_homes, num_slots: of a rank, H and S.
    """

    def __init__(self, group: dist.ProcessGroup, num_homes: int, num_slots: int) -> None:
        self.group = group
        self.num_homes, self.num_local = num_homes, num_homes + num_slots

    def dispatch(
        self, hidden: torch.Tensor, physical_ids: torch.Tensor, weights: torch.Tensor, instance: Instance
    ) -> Dispatched:
        ids_NK = physical_ids.to(torch.int64)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(lengths, torch.tensor([len(hidden)]), group=self.group)
        most = int(torch.stack(lengths).max())
        hidden_T, weights_TK = (_GatherAll.apply(_padded(t, most), self.group) for t in (hidden, weights))
        ids_TK = _GatherAll.apply(_padded(ids_NK + 1, most), self.group) - 1
        first = dist.get_rank(self.group) * self.num_local
        rows, counts = [], []
        for expert in range(first, first + self.num_local):
            rows.append((ids_TK == expert).nonzero())
            counts.append(len(rows[-1]))
        places = torch.cat(rows)
        at_home = sum(counts[: self.num_homes])
        arrived = hidden_T[places[:, 0]]
        used = len(instance.layout.replica_groups.counts)
        assert sum(counts[self.num_homes + used :]) == 0, "rows for a slot without a replica"
        return Dispatched(
            arrived[:at_home], arrived[at_home:],
            RowGroups.of(counts[: self.num_homes], hidden.device),
            RowGroups.of(counts[self.num_homes : self.num_homes + used], hidden.device),
            (places, weights_TK[places[:, 0], places[:, 1]], len(hidden_T), len(hidden), most),
        )  # fmt: skip

    def combine(self, outputs: Sequence[torch.Tensor], dispatched: Dispatched) -> torch.Tensor:
        places, weights, num_all, num_mine, most = dispatched.state
        rows = torch.cat([*outputs])
        part = rows.new_zeros(num_all, rows.shape[1]).index_add(0, places[:, 0], rows * weights.to(rows.dtype)[:, None])
        whole: torch.Tensor = _SumAll.apply(part, most, self.group)
        return whole[:num_mine]


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])


def _part(whole: torch.Tensor, length: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part."""
    first = dist.get_rank(group) * length
    return whole[first : first + length]


class _GatherAll(torch.autograd.Function):
    """`[n, ...]` of every rank as `[R * n, ...]`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.length = group, len(tensor)
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return _part(total, ctx.length, ctx.group), None


class _SumAll(torch.autograd.Function):
    """This rank's `[n, ...]` of the sum of all ranks' `[R * n, ...]`."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, length: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = part.clone()
        dist.all_reduce(total, group=group)
        return _part(total, length, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        parts = [torch.empty_like(grads[0]) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grads[0].contiguous(), group=ctx.group)
        return torch.cat(parts), None, None
