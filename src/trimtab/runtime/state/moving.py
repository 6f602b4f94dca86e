"""`move_experts`: moves experts to new homes between steps, with their rows of weights and of optimizer state.

Only rows of experts that change their rank are sent and written. All tensors of all layers share exchanges of bounded
size: a round exchanges whole tensors, or slices of all moving rows of a large one. Rows that leave and rows that take
their places are thus in the same round, and no row is overwritten before it was sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.expert_state import ExpertState, StateRows, name_of_tensor
from trimtab.runtime.state.flat_memory import Like, carve, packed_bytes
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.state.moving_parts import move_parts

# Most bytes that a rank sends in one exchange, except if one line of each moving row is more; it receives as many.
# Larger buffers are slower on the host, since the allocator returns their memory to the system.
ROUND_BYTES = 16 << 20


class Moved(NamedTuple):
    """Bytes of rows that this rank sent, and that the busiest rank sent."""

    sent: int
    busiest: int


def move_experts(layers: Sequence[HomeExperts], home_LE: Array, state: ExpertState, topology: Topology) -> Moved:
    """Move experts to new homes, after `check_movable` has passed on all ranks. Collective over all data ranks.

    Args:
        home_LE: `[L, E]` int16, the new homes; every rank keeps its number of experts.
        state: what moves with the experts.
    """
    moved = _moved(layers, home_LE)
    parts = [
        part
        for layer in moved
        for route in [_Route.of(layer, home_LE[layer.index], topology)]
        for rows in _rows_of(layer, state)
        for part in _slices(route, rows)
    ]
    for exchanged in _rounds(parts):
        _exchange(exchanged, topology)
    sent_R = sum((part.sent_R for part in parts), np.zeros(topology.num_ranks, np.int64))
    for layer, tensors in zip(moved, state.row_parts(moved), strict=True):
        sent_R = sent_R + move_parts(layer, home_LE[layer.index], tensors, topology)
    for layer in moved:
        for parameter in layer.parameters:
            parameter.grad = None
        layer.set_homes(home_LE[layer.index])
    return Moved(int(sent_R[topology.rank]), int(sent_R.max()))


def expert_state_bytes(layer: HomeExperts, state: ExpertState) -> int:
    """Bytes that a rank sends for one expert that moves: its weights and their state. Raises InputError as
    `ExpertState.rows`."""
    return sum(_bytes_of_row(rows) for rows in _rows_of(layer, state)) + state.part_bytes(layer)


def check_movable(layers: Sequence[HomeExperts], home_LE: Array, state: ExpertState) -> None:
    """Check everything that `move_experts` would move. Not a collective.

    Raises:
        InputError: if an optimizer keeps state of an expert that can't move; see `ExpertState`.
        RuntimeError: if a gradient that no optimizer has used would be lost.
    """
    for layer in _moved(layers, home_LE):
        if state.gradients_wait(layer):
            raise RuntimeError(
                f"MoE layer {layer.index} has gradients that wait for an optimizer step; call zero_grad() before the "
                "next step is planned, since its plan may move experts"
            )
        state.rows(layer)


def state_to_move(layers: Sequence[HomeExperts], home_LE: Array, state: ExpertState) -> dict[str, object]:
    """Optimizer state that must be equal on all ranks before `move_experts`, by name. Call `check_movable` first."""
    return {
        f"optimizer state of {name_of_tensor(layer, t)}": state.form(layer, t)
        for layer in _moved(layers, home_LE)
        for t in range(len(layer.likes))
    }


def _moved(layers: Sequence[HomeExperts], home_LE: Array) -> list[HomeExperts]:
    return [layer for layer in layers if not np.array_equal(layer.home_E, home_LE[layer.index])]


def _rows_of(layer: HomeExperts, state: ExpertState) -> list[StateRows]:
    """All stacks and lists whose rows are the layer's home experts, in the same order on all ranks."""
    weights: list[StateRows] = [
        tensor.detach() if isinstance(tensor, torch.Tensor) else [parameter.detach() for parameter in tensor]
        for tensor in layer.tensors
    ]
    return weights + state.rows(layer)


def _bytes_of_row(rows: StateRows) -> int:
    return rows.nbytes // len(rows) if isinstance(rows, torch.Tensor) else rows[0].nbytes


@dataclass(frozen=True, eq=False)
class _Route:
    """The rows of one layer that move.

    Attributes:
        leaving, arriving: rows of this rank that go to each rank, and that come from each rank, both in ascending order
            of experts. This rank is one of them, if experts change their row on it.
        sent_R: `[R]` number of experts that leave each rank; as many arrive there.
        device: the device of the layer.
    """

    leaving: list[list[int]]
    arriving: list[list[int]]
    sent_R: Array
    device: torch.device

    @classmethod
    def of(cls, layer: HomeExperts, new_E: Array, topology: Topology) -> _Route:
        old_E, rows_E, new_rows_E = layer.home_E, layer.rows_E, layer.rows_after(new_E)
        moved_E, ranks, rank = (old_E != new_E) | (rows_E != new_rows_E), range(topology.num_ranks), topology.rank
        return cls(
            [rows_E[moved_E & (old_E == rank) & (new_E == other)].tolist() for other in ranks],
            [new_rows_E[moved_E & (new_E == rank) & (old_E == other)].tolist() for other in ranks],
            np.bincount(old_E[moved_E], minlength=topology.num_ranks),
            layer.device,
        )

    @cached_property
    def leaving_indices(self) -> list[torch.Tensor]:
        """`leaving` on the device."""
        return _indices(self.leaving, self.device)

    @cached_property
    def arriving_indices(self) -> list[torch.Tensor]:
        """`arriving` on the device."""
        return _indices(self.arriving, self.device)


def _indices(rows_R: list[list[int]], device: torch.device) -> list[torch.Tensor]:
    flat = torch.tensor([row for rows in rows_R for row in rows], dtype=torch.int64, device=device)
    return list(flat.split([len(rows) for rows in rows_R]))


@dataclass(frozen=True, eq=False)
class _Part:
    """The moving rows of one tensor, or a slice of each of them.

    Attributes:
        rows: the tensor, or a view of the slice.
        sent_R: `[R]` bytes that each rank sends.
    """

    route: _Route
    rows: StateRows
    sent_R: Array

    def like(self, count: int) -> Like:
        """Shape and dtype of rows in a buffer."""
        first = self.rows[0]
        return (count, *first.shape), first.dtype

    def read(self, other: int, out: torch.Tensor) -> None:
        """Copy the rows that go to a rank to `out [n, ...]`."""
        if isinstance(self.rows, torch.Tensor):
            torch.index_select(self.rows, 0, self.route.leaving_indices[other], out=out)
        else:
            for target, row in zip(out, self.route.leaving[other], strict=True):
                target.copy_(self.rows[row])

    def write(self, other: int, values: torch.Tensor) -> None:
        """Write the rows `[n, ...]` that come from a rank."""
        if isinstance(self.rows, torch.Tensor):
            self.rows.index_copy_(0, self.route.arriving_indices[other], values)
        else:
            for value, row in zip(values, self.route.arriving[other], strict=True):
                self.rows[row].copy_(value)


def _slices(route: _Route, rows: StateRows) -> Iterator[_Part]:
    """The moving rows of a tensor in parts of at most `ROUND_BYTES`, each a slice of the rows' first dimension."""
    row_bytes, shape = _bytes_of_row(rows), rows[0].shape
    lines = shape[0] if shape else 1
    step = max(1, lines * ROUND_BYTES // max(1, row_bytes * int(route.sent_R.max())))
    if step >= lines:
        yield _Part(route, rows, route.sent_R * row_bytes)
        return
    for start in range(0, lines, step):
        count = min(step, lines - start)
        part: StateRows
        if isinstance(rows, torch.Tensor):
            part = rows.narrow(1, start, count)
        else:
            part = [row.narrow(0, start, count) for row in rows]
        yield _Part(route, part, route.sent_R * (row_bytes // lines * count))


def _rounds(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Parts that are exchanged together, the same on all ranks."""
    together: list[_Part] = []
    sent_R: Array = np.zeros(1, np.int64)
    for part in parts:
        if together and (sent_R + part.sent_R).max() > ROUND_BYTES:
            yield together
            together, sent_R = [], np.zeros(1, np.int64)
        together.append(part)
        sent_R = sent_R + part.sent_R
    if together:
        yield together


def _exchange(parts: Sequence[_Part], topology: Topology) -> None:
    """Exchange the moving rows of all parts between all ranks, in one collective."""
    ranks = range(topology.num_ranks)
    leaving = [(other, part) for other in ranks for part in parts if part.route.leaving[other]]
    arriving = [(other, part) for other in ranks for part in parts if part.route.arriving[other]]
    like_sent = [part.like(len(part.route.leaving[other])) for other, part in leaving]
    like_received = [part.like(len(part.route.arriving[other])) for other, part in arriving]
    device = parts[0].route.device
    sent = torch.empty(packed_bytes(like_sent), dtype=torch.uint8, device=device)
    received = torch.empty(packed_bytes(like_received), dtype=torch.uint8, device=device)
    for (other, part), out in zip(leaving, carve(sent, like_sent), strict=True):
        part.read(other, out)
    send_splits, receive_splits = [0 for _ in ranks], [0 for _ in ranks]
    for splits, places, likes in (send_splits, leaving, like_sent), (receive_splits, arriving, like_received):
        for (other, _), like in zip(places, likes, strict=True):
            splits[other] += packed_bytes([like])
    dist.all_to_all_single(received, sent, receive_splits, send_splits, group=topology.experts)
    for (other, part), values in zip(arriving, carve(received, like_received), strict=True):
        part.write(other, values)
