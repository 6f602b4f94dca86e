"""Point-to-point traffic of replicas: weights from home to slot before a layer, gradients from slot to home after it.

All ranks post the same transfers in the same order, on a process group of their own, so that they run beside the
layer's all-to-all. A home and a slot know of each other from the plan alone, and messages between two ranks match in
the order in which they are posted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from trimtab.runtime.layout import InstanceReplicas
from trimtab.trace.routing import Array


@dataclass
class _GradientReturn:
    """Gradients on their way home: for each arriving replica its home row and a buffer for each stacked tensor."""

    parameters: Sequence[torch.nn.Parameter]
    rows: list[int] = field(default_factory=list)
    buffers: list[list[torch.Tensor]] = field(default_factory=list)
    sent: list[torch.Tensor] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)


class ReplicaTransfers:
    """Transfers of one rank. `bytes_sent` counts what it sent since it was last set to 0."""

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self.bytes_sent = 0
        self._group = group
        self._rank = rank
        self._returns: list[tuple[object, _GradientReturn]] = []

    def fetch(
        self,
        parameters: Sequence[torch.nn.Parameter],
        slots: Sequence[torch.Tensor],
        replicas: InstanceReplicas,
        home_E: Array,
    ) -> list[dist.Work]:
        """Start bringing an instance's replica weights into the slots.

        Args:
            parameters: this rank's home experts of the layer, stacked tensors `[H, ...]`.
            slots: a tensor `[slots, ...]` for each of them.

        Returns:
            Works to wait for before the slots are used.
        """
        operations: list[dist.P2POp] = []
        for p in range(replicas.count):
            expert, rank, home = _ends(replicas, p, home_E)
            for parameter, slot_tensor in zip(parameters, slots, strict=True):
                if home == self._rank:
                    operations.append(self._send(parameter.detach()[_home_row(home_E, expert)], rank))
                elif rank == self._rank:
                    operations.append(self._receive(slot_tensor[replicas.slots[p]], home))
        return dist.batch_isend_irecv(operations) if operations else []

    def return_gradients(
        self,
        micro_step: object,
        parameters: Sequence[torch.nn.Parameter],
        slot_gradients: Sequence[torch.Tensor],
        replicas: InstanceReplicas,
        home_E: Array,
    ) -> None:
        """Start sending an instance's replica gradients home, in at least float32.

        What an earlier micro-step still has on its way is added at home first, so that at most one micro-step's
        gradients are ever in flight.
        """
        if self._returns and self._returns[0][0] is not micro_step:
            self.finish()
        pending = _GradientReturn(parameters)
        operations: list[dist.P2POp] = []
        for p in range(replicas.count):
            expert, rank, home = _ends(replicas, p, home_E)
            if home == self._rank:
                buffers = [torch.empty_like(w[0], dtype=_accumulation_dtype(w.dtype)) for w in parameters]
                pending.rows.append(_home_row(home_E, expert))
                pending.buffers.append(buffers)
            for tensor, gradient in enumerate(slot_gradients):
                if home == self._rank:
                    operations.append(self._receive(buffers[tensor], rank))
                elif rank == self._rank:
                    wide = gradient[replicas.slots[p]].to(_accumulation_dtype(gradient.dtype)).contiguous()
                    pending.sent.append(wide)
                    operations.append(self._send(wide, home))
        if operations:
            pending.works = dist.batch_isend_irecv(operations)
            self._returns.append((micro_step, pending))

    def finish(self) -> None:
        """Wait for all gradients under way and add them to `.grad` of the home experts, in plan order."""
        for _, pending in self._returns:
            for work in pending.works:
                work.wait()
            for row, buffers in zip(pending.rows, pending.buffers, strict=True):
                for parameter, buffer in zip(pending.parameters, buffers, strict=True):
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    parameter.grad[row] += buffer
        self._returns.clear()

    def _send(self, tensor: torch.Tensor, rank: int) -> dist.P2POp:
        self.bytes_sent += tensor.nbytes
        return dist.P2POp(dist.isend, tensor, group=self._group, group_peer=rank)

    def _receive(self, tensor: torch.Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=rank)


def _ends(replicas: InstanceReplicas, p: int, home_E: Array) -> tuple[int, int, int]:
    """Expert, rank and home of a replica."""
    expert = int(replicas.experts[p])
    return expert, int(replicas.ranks[p]), int(home_E[expert])


def _home_row(home_E: Array, expert: int) -> int:
    """Where an expert stands among the experts of its home."""
    return int(np.count_nonzero(home_E[:expert] == home_E[expert]))


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
