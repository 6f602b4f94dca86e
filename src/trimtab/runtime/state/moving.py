"""`move_experts`: moves experts to new homes between steps, with their rows of weights and of optimizer state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts, parameters_of
from trimtab.runtime.state.optimizer_rows import describe_state, state_by_row


def move_experts(
    layers: Sequence[HomeExperts], home_LE: Array, optimizers: Sequence[torch.optim.Optimizer], topology: Topology
) -> int:
    """Move experts to new homes, after `check_movable` has passed on all ranks. Collective over the ranks of an
    expert-parallel group.

    Args:
        home_LE: `[L, E]` int16, the new homes; every rank keeps its number of experts.
        optimizers: optimizers whose state moves with the experts.

    Returns:
        Bytes that this rank sent to others.
    """
    sent = 0
    for layer in _moved(layers, home_LE):
        route = _Route(layer.home_E, home_LE[layer.index], topology)
        for rows in _rows_of(layer, optimizers):
            sent += route.carry(rows)
        for parameter in layer.parameters:
            parameter.grad = None
        layer.set_homes(home_LE[layer.index])
    return sent


def check_movable(layers: Sequence[HomeExperts], home_LE: Array, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Check everything that `move_experts` would move. Not a collective.

    Raises:
        InputError: if an optimizer keeps state of an expert that can't move; see `state_by_row`.
        RuntimeError: if a gradient that no optimizer has used would be lost.
    """
    for layer in _moved(layers, home_LE):
        for parameter in layer.parameters:
            if parameter.grad is not None and parameter.grad.count_nonzero():
                raise RuntimeError(
                    f"MoE layer {layer.index} has gradients that wait for an optimizer step; call zero_grad() before "
                    "the next step is planned, since its plan may move experts"
                )
        _rows_of(layer, optimizers)


def state_to_move(
    layers: Sequence[HomeExperts], home_LE: Array, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, object]:
    """Optimizer state that must be equal on all ranks before `move_experts`, by name. Call `check_movable` first."""
    return {
        f"optimizer state of {_where(layer, t)}": [
            describe_state(optimizer, parameters_of(tensor)[0], is_stack=isinstance(tensor, torch.Tensor))
            for optimizer in optimizers
        ]
        for layer in _moved(layers, home_LE)
        for t, tensor in enumerate(layer.tensors)
    }


def _moved(layers: Sequence[HomeExperts], home_LE: Array) -> list[HomeExperts]:
    return [layer for layer in layers if not np.array_equal(layer.home_E, home_LE[layer.index])]


def _rows_of(
    layer: HomeExperts, optimizers: Sequence[torch.optim.Optimizer]
) -> list[torch.Tensor | list[torch.Tensor]]:
    """All stacks and lists whose rows are the layer's home experts, in the same order on all ranks."""
    found: list[torch.Tensor | list[torch.Tensor]] = []
    for t, tensor in enumerate(layer.tensors):
        found.append(tensor.detach() if isinstance(tensor, torch.Tensor) else [p.detach() for p in tensor])
        for optimizer in optimizers:
            found += state_by_row(optimizer, tensor, _where(layer, t), layer.home_experts)
    return found


def _where(layer: HomeExperts, t: int) -> str:
    return f"MoE layer {layer.index}, expert tensor {t}"


class _Route:
    """The exchange of one layer's rows between ranks: rows sent and received, and their order."""

    def __init__(self, old_E: Array, new_E: Array, topology: Topology) -> None:
        self._group, self._rank = topology.experts, topology.rank
        mine = np.flatnonzero(old_E == self._rank)
        # Rows leave ordered by rank, there by expert; they arrive ordered by source, there by expert.
        self._leaving = torch.from_numpy(np.argsort(new_E[mine], kind="stable"))
        self._send = np.bincount(new_E[mine], minlength=topology.num_ranks).tolist()
        arriving = np.flatnonzero(new_E == self._rank)
        self._receive = np.bincount(old_E[arriving], minlength=topology.num_ranks).tolist()
        order = np.argsort(old_E[arriving], kind="stable")
        self._arriving = torch.from_numpy(np.argsort(order, kind="stable"))

    def carry(self, tensor: torch.Tensor | list[torch.Tensor]) -> int:
        """Exchange the rows of a stack `[H, ...]`, or H tensors `[...]`, in place. Returns bytes sent to others."""
        if isinstance(tensor, torch.Tensor):
            rows = tensor.index_select(0, self._leaving.to(tensor.device)).contiguous()
        else:
            rows = torch.stack([tensor[row] for row in self._leaving.tolist()])
        leaving = rows.view(len(rows), -1).view(torch.uint8)
        arrived = torch.empty_like(leaving)
        dist.all_to_all_single(arrived, leaving, self._receive, self._send, group=self._group)
        ordered = arrived.index_select(0, self._arriving.to(rows.device)).view(rows.dtype).view(rows.shape)
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(ordered)
        else:
            for target, row in zip(tensor, ordered, strict=True):
                target.copy_(row)
        return (len(rows) - self._send[self._rank]) * leaving.shape[1]
