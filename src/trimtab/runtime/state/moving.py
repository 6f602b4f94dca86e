"""`move_experts`: moves experts to new homes between steps, with their rows of weights and of optimizer state.

Only rows of experts that change their place are sent and written. All whole rows of all layers share exchanges of
bounded size: a round exchanges whole tensors, or slices of all moving rows of a large one. Rows that leave and rows
that take their places are thus in the same round, and no row is overwritten before it was sent.

Rows of which each rank holds a part, such as those of a distributed optimizer, are exchanged between all data ranks.
Rank (g, r), rank r of expert-parallel group g, holds the part g of the rows of rank r's home experts. An expert that
moves from rank a, row i, to rank b, row j goes from all (g, a) to all (g', b): the elements that are in both the part g
of row i and the part g' of row j. If it keeps its row, these are whole parts and g = g'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.expert_places import ExpertPlaces
from trimtab.runtime.state.flat_memory import Like, carve, packed_bytes
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.state.known_places import know
from trimtab.runtime.state.optimizer_rows import ExpertState, RowParts, StateRows, name_of_tensor

# Most bytes that a rank sends in one exchange, except if one line of each moving row is more; it receives as many.
# Larger buffers are slower on the host, since the allocator returns their memory to the system.
ROUND_BYTES = 16 << 20
# The same for parts of rows, about.
PARTS_ROUND_BYTES = 64 << 20

_Rows = tuple[list[int], torch.Tensor]
"""Rows of this rank that go to another rank, or come from it: their numbers, and the same on the device."""


def move_experts(
    layers: Sequence[HomeExperts], places_L: Sequence[ExpertPlaces], state: ExpertState, topology: Topology
) -> Array:
    """Move experts to new places, after `check_movable` has passed on all ranks. Collective over all data ranks.

    Args:
        places_L: the new places of each layer's experts; every rank keeps its number of experts.
        state: what moves with the experts.

    Returns:
        `[R]` bytes of rows that each rank of an expert-parallel group sent.
    """
    moved = _moved(layers, places_L)
    moves = [_Move(layer, places_L[layer.index], topology) for layer in moved]
    slices = [
        part
        for layer, move in zip(moved, moves, strict=True)
        for rows in _rows_of(layer, state)
        for part in _slices(move, rows)
    ]
    for together in _rounds(slices):
        _exchange_slices(together, topology)
    sent_R: Array = sum((part.sent_R for part in slices), np.zeros(topology.num_ranks, np.int64))
    for move, tensors in zip(moves, state.row_parts(moved), strict=True):
        for parts in tensors:
            sent_R = sent_R + _move_parts(move, parts, topology)
    for layer, move in zip(moved, moves, strict=True):
        for parameter in layer.parameters:
            parameter.grad = None
        layer.known.set(move.after)
        know(layer.known, layer.tensors)
    return sent_R


def expert_state_bytes(layer: HomeExperts, state: ExpertState) -> int:
    """Bytes that a rank sends for one expert that moves: its weights and their state. Raises InputError as
    `ExpertState.rows`."""
    return sum(_bytes_of_row(rows) for rows in _rows_of(layer, state)) + state.part_bytes(layer)


def check_movable(layers: Sequence[HomeExperts], places_L: Sequence[ExpertPlaces], state: ExpertState) -> None:
    """Check everything that `move_experts` would move. Not a collective.

    Raises:
        InputError: if state of an expert can't move; see `ExpertState` and `KnownPlaces`.
        RuntimeError: if a gradient that no optimizer has used would be lost.
    """
    for layer in _moved(layers, places_L):
        if layer.known.returns_to is not None:
            raise RuntimeError(f"the experts of MoE layer {layer.index} can't move within first_homes()")
        if state.gradients_wait(layer):
            raise RuntimeError(
                f"MoE layer {layer.index} has gradients that wait for an optimizer step; call zero_grad() before the "
                "next step is planned, since its plan may move experts"
            )
        _rows_of(layer, state)


def state_to_move(
    layers: Sequence[HomeExperts], places_L: Sequence[ExpertPlaces], state: ExpertState
) -> dict[str, object]:
    """State that must be equal on all ranks before `move_experts`, by name. Call `check_movable` first."""
    moved = _moved(layers, places_L)
    optimizers = {
        f"optimizer state of {name_of_tensor(layer, t)}": state.form(layer, t)
        for layer in moved
        for t in range(len(layer.likes))
    }
    kept = {
        f"registered state of MoE layer {layer.index}": [(rows[0].shape, rows[0].dtype) for rows in _kept(layer)]
        for layer in moved
        if layer.known.states
    }
    return optimizers | kept


def _moved(layers: Sequence[HomeExperts], places_L: Sequence[ExpertPlaces]) -> list[HomeExperts]:
    return [layer for layer in layers if layer.places.moved(places_L[layer.index]).size]


def _rows_of(layer: HomeExperts, state: ExpertState) -> list[StateRows]:
    """All stacks and lists whose rows are the layer's home experts, in the same order on all ranks."""
    weights: list[StateRows] = [
        tensor.detach() if isinstance(tensor, torch.Tensor) else [parameter.detach() for parameter in tensor]
        for tensor in layer.tensors
    ]
    return weights + state.rows(layer) + _kept(layer)


def _kept(layer: HomeExperts) -> list[StateRows]:
    """What users keep of the experts, but for what has the parameters' memory, as `model.state_dict()` has, or that of
    another tensor that is kept. Raises InputError as `KnownPlaces.kept`, and for tensors on another device."""
    seen = {parameter.data_ptr() for parameter in layer.parameters}
    kept: list[StateRows] = []
    for tensors in layer.known.kept([shape for shape, _ in layer.likes]):
        rows = tensors.detach() if isinstance(tensors, torch.Tensor) else [tensor.detach() for tensor in tensors]
        if rows[0].device != layer.device:
            raise InputError(
                f"state that moves with the experts (register_state) is on {rows[0].device} and MoE layer "
                f"{layer.index} on {layer.device}; it should be on the same device"
            )
        if rows[0].data_ptr() not in seen:
            kept.append(rows)
            seen.add(rows[0].data_ptr())
    return kept


def _bytes_of_row(rows: StateRows) -> int:
    return rows.nbytes // len(rows) if isinstance(rows, torch.Tensor) else rows[0].nbytes


class _Move:
    """The move of one layer's experts.

    Attributes:
        before, after: places of all experts.
        moved: the experts whose places differ, ascending.
        device: the device of the layer.
        sent_R: `[R]` number of experts that leave each rank; as many arrive there.
        leaving: for each rank the rows of this rank that go there, ascending by expert. This rank is one of them, if
            experts change their row on it.
        arriving: for each rank the rows of this rank that are for what comes from there, ascending by expert.
    """

    def __init__(self, layer: HomeExperts, after: ExpertPlaces, topology: Topology) -> None:
        self.before, self.after, self.device = layer.places, after, layer.device
        self.moved = self.before.moved(after)
        self.sent_R: Array = np.bincount(self.before.home_E[self.moved], minlength=topology.num_ranks)
        self.leaving = self._rows(self.before, after, topology)
        self.arriving = self._rows(after, self.before, topology)

    def _rows(self, here: ExpertPlaces, there: ExpertPlaces, topology: Topology) -> list[_Rows]:
        experts = self.moved[here.home_E[self.moved] == topology.rank]
        rows_R = [here.rows_E[experts[there.home_E[experts] == other]].tolist() for other in range(topology.num_ranks)]
        # One copy to the device.
        indices = torch.tensor([row for rows in rows_R for row in rows], dtype=torch.int64, device=self.device)
        return [*zip(rows_R, indices.split([*map(len, rows_R)]), strict=True)]


@dataclass(frozen=True, eq=False)
class _Slice:
    """The moving rows of one tensor, or a slice of each of them.

    Attributes:
        tensor: the tensor, or a view of the slice.
        sent_R: `[R]` bytes that each rank sends.
    """

    move: _Move
    tensor: StateRows
    sent_R: Array


def _slices(move: _Move, rows: StateRows) -> Iterator[_Slice]:
    """The moving rows of a tensor in parts of at most `ROUND_BYTES`, each a slice of the rows' first dimension."""
    row_bytes, shape = _bytes_of_row(rows), rows[0].shape
    lines = shape[0] if shape else 1
    step = max(1, lines * ROUND_BYTES // max(1, row_bytes * int(move.sent_R.max())))
    if step >= lines:
        yield _Slice(move, rows, move.sent_R * row_bytes)
        return
    for start in range(0, lines, step):
        count = min(step, lines - start)
        part: StateRows
        if isinstance(rows, torch.Tensor):
            part = rows.narrow(1, start, count)
        else:
            part = [row.narrow(0, start, count) for row in rows]
        yield _Slice(move, part, move.sent_R * (row_bytes // lines * count))


def _rounds(slices: Sequence[_Slice]) -> Iterator[list[_Slice]]:
    """Slices that are exchanged together, the same on all ranks."""
    together: list[_Slice] = []
    sent_R: Array = np.zeros(1, np.int64)
    for part in slices:
        if together and (sent_R + part.sent_R).max() > ROUND_BYTES:
            yield together
            together, sent_R = [], np.zeros(1, np.int64)
        together.append(part)
        sent_R = sent_R + part.sent_R
    if together:
        yield together


def _exchange_slices(slices: Sequence[_Slice], topology: Topology) -> None:
    """Exchange the moving rows of all slices between the ranks of an expert-parallel group."""

    def pieces(rows_SR: Sequence[Sequence[_Rows]]) -> list[list[_Piece]]:
        return [
            [_Piece(part.tensor, *rows) for part, rows in zip(slices, rows_S, strict=True) if rows[0]]
            for rows_S in zip(*rows_SR, strict=True)
        ]

    leaving, arriving = [part.move.leaving for part in slices], [part.move.arriving for part in slices]
    _exchange(pieces(leaving), pieces(arriving), slices[0].move.device, topology.experts)


def _move_parts(move: _Move, tensor: RowParts, topology: Topology) -> Array:
    """Move the parts of one tensor's moving rows. Collective over all data ranks.

    Returns:
        `[R]` bytes that each rank of an expert-parallel group sends, the mean over groups; the same on all ranks.
    """
    like = tensor.parts[0]
    elements = int(tensor.ranges_GH2[:, :, 1].max(initial=0))
    row_bytes = elements * like.dtype.itemsize
    rounds = max(1, -(-int(move.sent_R.max()) * row_bytes // PARTS_ROUND_BYTES))
    step = max(1, -(-elements // rounds))
    for first in range(0, elements, step):
        leaving: list[list[_Piece]] = [[] for _ in range(topology.num_data_ranks)]
        arriving: list[list[_Piece]] = [[] for _ in range(topology.num_data_ranks)]
        for leaves, other, part in _shared_elements(move, tensor, first, min(first + step, elements), topology):
            (leaving if leaves else arriving)[other].append(_Piece([part], [0]))
        _exchange(leaving, arriving, like.device, topology.data)
    return move.sent_R * row_bytes // topology.groups


def _shared_elements(
    move: _Move, tensor: RowParts, first: int, end: int, topology: Topology
) -> Iterator[tuple[bool, int, torch.Tensor]]:
    """Yields for each piece of the moving rows' elements from `first` to `end` whether it leaves this rank, the data
    rank that it goes to or comes from, and its elements here. Both ranks have the pieces between them in the same
    order."""
    ranges_GH2, mine = tensor.ranges_GH2, topology.group
    for expert in move.moved.tolist():
        for leaves, here, there in (True, move.before, move.after), (False, move.after, move.before):
            if here.home_E[expert] != topology.rank:
                continue
            row, other_row = here.rows_E[expert], there.rows_E[expert]
            start = ranges_GH2[mine, row, 0]
            for other in range(topology.groups):
                low = max(first, start, ranges_GH2[other, other_row, 0])
                high = min(end, ranges_GH2[mine, row, 1], ranges_GH2[other, other_row, 1])
                if low < high:
                    elements = tensor.parts[row][low - start : high - start]
                    yield leaves, other * topology.num_ranks + int(there.home_E[expert]), elements


@dataclass(frozen=True, eq=False)
class _Piece:
    """What one rank sends to another of one tensor.

    Attributes:
        tensor: a stack, or a list of tensors of one shape.
        numbers: of the rows that are sent, or written.
        indices: the same on the device; only for a stack.
    """

    tensor: StateRows
    numbers: Sequence[int]
    indices: torch.Tensor | None = None

    @property
    def like(self) -> Like:
        """Shape and dtype in a buffer."""
        return (len(self.numbers), *self.tensor[0].shape), self.tensor[0].dtype

    def read(self, out: torch.Tensor) -> None:
        """Copy the rows to `out [n, ...]`."""
        if isinstance(self.tensor, torch.Tensor):
            assert self.indices is not None
            torch.index_select(self.tensor, 0, self.indices, out=out)
        else:
            for target, row in zip(out, self.numbers, strict=True):
                target.copy_(self.tensor[row])

    def write(self, values: torch.Tensor) -> None:
        """Write `values [n, ...]` to the rows."""
        if isinstance(self.tensor, torch.Tensor):
            assert self.indices is not None
            self.tensor.index_copy_(0, self.indices, values)
        else:
            for value, row in zip(values, self.numbers, strict=True):
                self.tensor[row].copy_(value)


def _exchange(
    leaving: Sequence[Sequence[_Piece]],
    arriving: Sequence[Sequence[_Piece]],
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Send pieces to all ranks of a group, and write those that arrive, in one collective. Both ranks have the pieces
    between them in the same order."""
    likes_sent, likes_received = ([[piece.like for piece in pieces] for pieces in side] for side in (leaving, arriving))
    send_splits, receive_splits = ([packed_bytes(like) for like in likes] for likes in (likes_sent, likes_received))
    sent = torch.empty(sum(send_splits), dtype=torch.uint8, device=device)
    received = torch.empty(sum(receive_splits), dtype=torch.uint8, device=device)
    for buffer, pieces, like in zip(sent.split(send_splits), leaving, likes_sent, strict=True):
        for piece, out in zip(pieces, carve(buffer, like), strict=True):
            piece.read(out)
    dist.all_to_all_single(received, sent, receive_splits, send_splits, group=group)
    for buffer, pieces, like in zip(received.split(receive_splits), arriving, likes_received, strict=True):
        for piece, values in zip(pieces, carve(buffer, like), strict=True):
            piece.write(values)
