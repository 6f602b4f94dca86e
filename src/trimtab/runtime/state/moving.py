"""`move_experts`: exchanges rows of experts between ranks, with their optimizer state, for renumbering between steps.

Only rows of experts that change their place are sent and written. The rows of all tensors of all layers share exchanges
of bounded size: a round exchanges whole tensors, or slices of all moving rows of a large one. Rows that leave and rows
that take their places are thus in the same round, and no row is overwritten before it was sent.

Rows of which each rank holds a part, such as those of a distributed optimizer, are exchanged between all data ranks.
Rank (g, r), rank r of expert-parallel group g, holds the part g of the rows of rank r's home experts. An expert that
moves from rank a, row i, to rank b, row j goes from all (g, a) to all (g', b): the elements that are in both the part g
of row i and the part g' of row j. If it keeps its row, these are whole parts and g = g'. Whole rows are exchanged
within each group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.expert_places import ExpertPlaces
from trimtab.runtime.state.flat_memory import carve, packed_bytes
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.state.optimizer_rows import ExpertState, RowParts, StateRows, name_of_tensor

# About the most bytes that a rank sends in one exchange, unless a line of each moving row is more. It receives as many.
# Larger buffers are slower on the host, since the allocator returns their memory to the system.
ROUND_BYTES = 16 << 20


def move_experts(
    layers: Sequence[HomeExperts], places_L: Sequence[ExpertPlaces], state: ExpertState, topology: Topology
) -> Array:
    """Exchange rows, after `check_movable` has passed on all ranks. Collective over all data ranks.

    Args:
        places_L: where the rows of each layer's experts go; every rank keeps its number of experts.
        state: what moves with the experts.

    Returns:
        `[R]` bytes of rows that each rank of an expert-parallel group sent.
    """
    moved = _moved(layers, places_L)
    moves = [_Move(layer, places_L[layer.index], topology) for layer in moved]
    sent_R: Array = np.zeros(topology.num_ranks, np.int64)
    whole = [[_as_parts(rows) for rows in _rows_of(layer, state)] for layer in moved]
    for tensors_L in (whole, state.row_parts(moved)):
        slices = [
            part
            for move, tensors in zip(moves, tensors_L, strict=True)
            for tensor in tensors
            for part in _slices(move, tensor)
        ]
        for together in _rounds(slices):
            _exchange(together, topology)
        sent_R = sum((part.sent_R for part in slices), sent_R)
    for parameter in (parameter for layer in moved for parameter in layer.parameters):
        parameter.grad = None
    return sent_R


def expert_state_bytes(layer: HomeExperts, state: ExpertState) -> int:
    """Bytes that a rank sends for one expert that moves: its weights and their state. Raises InputError as
    `ExpertState.rows`."""
    return sum(_bytes_of_row(rows) for rows in _rows_of(layer, state)) + state.part_bytes(layer)


def check_movable(layers: Sequence[HomeExperts], places_L: Sequence[ExpertPlaces], state: ExpertState) -> None:
    """Check everything that `move_experts` would move. Not a collective.

    Raises:
        InputError: if state of an expert can't move; see `ExpertState`.
        RuntimeError: if a gradient that no optimizer has used would be lost.
    """
    moved = _moved(layers, places_L)
    state.check_elementwise(moved)
    for layer in moved:
        if state.gradients_wait(layer):
            raise RuntimeError(
                f"MoE layer {layer.index} has gradients that wait for an optimizer step; call zero_grad() before "
                "renumber()"
            )
        _rows_of(layer, state)


def state_to_move(
    layers: Sequence[HomeExperts], places_L: Sequence[ExpertPlaces], state: ExpertState
) -> dict[str, object]:
    """State that must be equal on all ranks before `move_experts`, by name. Call `check_movable` first."""
    return {
        f"optimizer state of {name_of_tensor(layer, t)}": state.form(layer, t)
        for layer in _moved(layers, places_L)
        for t in range(len(layer.likes))
    }


def _moved(layers: Sequence[HomeExperts], places_L: Sequence[ExpertPlaces]) -> list[HomeExperts]:
    return [layer for layer in layers if layer.places.moved(places_L[layer.index]).size]


def _rows_of(layer: HomeExperts, state: ExpertState) -> list[StateRows]:
    """All stacks and lists whose rows are the layer's home experts, in the same order on all ranks."""
    weights: list[StateRows] = [
        tensor.detach() if isinstance(tensor, torch.Tensor) else [parameter.detach() for parameter in tensor]
        for tensor in layer.tensors
    ]
    return weights + state.rows(layer)


def _bytes_of_row(rows: StateRows) -> int:
    return rows.nbytes // len(rows) if isinstance(rows, torch.Tensor) else rows[0].nbytes


class _Move:
    """The move of one layer's experts.

    Attributes:
        device: the device of the layer.
        sent_R: `[R]` number of experts that leave each rank; as many arrive there.
        ends: for each expert that leaves this rank, or arrives at it, ascending by expert: whether it leaves, its row
            here, its other rank, and its row there. It may leave and arrive, if it changes its row on this rank.
    """

    def __init__(self, layer: HomeExperts, after: ExpertPlaces, topology: Topology) -> None:
        before, self.device = layer.places, layer.device
        moved = before.moved(after)
        self.sent_R: Array = np.bincount(before.home_E[moved], minlength=topology.num_ranks)
        self.ends = [
            (leaves, int(here.rows_E[expert]), int(there.home_E[expert]), int(there.rows_E[expert]))
            for expert in moved.tolist()
            for leaves, here, there in ((True, before, after), (False, after, before))
            if here.home_E[expert] == topology.rank
        ]


@dataclass(frozen=True, eq=False)
class _Slice:
    """Lines of the moving rows of one tensor.

    Attributes:
        tensor: the tensor; of whole rows the parts of one group.
        first, end: numbers of the lines, elements of a row's first dimension, without `end`.
        sent_R: `[R]` bytes that each rank of an expert-parallel group sends, the mean over groups; the same on all
            ranks.
    """

    move: _Move
    tensor: RowParts
    first: int
    end: int
    sent_R: Array


def _as_parts(rows: StateRows) -> RowParts:
    """Whole rows as the parts of one group."""
    if not rows[0].ndim:
        rows = rows[:, None] if isinstance(rows, torch.Tensor) else [row[None] for row in rows]
    return RowParts(rows, np.array([[(0, len(row)) for row in rows]], np.int64))


def _slices(move: _Move, tensor: RowParts) -> Iterator[_Slice]:
    """The moving rows of a tensor in slices of at most `ROUND_BYTES`."""
    like, groups = tensor.parts[0], len(tensor.ranges_GH2)
    lines = int(tensor.ranges_GH2[:, :, 1].max(initial=0))
    sent_R = move.sent_R * like.shape[1:].numel() * like.itemsize
    step = max(1, groups * ROUND_BYTES // max(1, int(sent_R.max())))
    for first in range(0, lines, step):
        end = min(first + step, lines)
        yield _Slice(move, tensor, first, end, sent_R * (end - first) // groups)


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


def _pieces(part: _Slice, topology: Topology) -> Iterator[tuple[bool, int, torch.Tensor]]:
    """Yields for each piece of a slice whether it leaves this rank, the rank that it goes to or comes from, and its
    lines here. Both ranks have the pieces between them in the same order."""
    ranges_GH2, parts = part.tensor.ranges_GH2, part.tensor.parts
    mine = topology.group if len(ranges_GH2) > 1 else 0
    for leaves, row, rank, other_row in part.move.ends:
        start, end = ranges_GH2[mine, row].tolist()
        for other, (other_start, other_end) in enumerate(ranges_GH2[:, other_row].tolist()):
            low, high = max(part.first, start, other_start), min(part.end, end, other_end)
            if low < high:
                yield leaves, other * topology.num_ranks + rank, parts[row][low - start : high - start]


def _exchange(slices: Sequence[_Slice], topology: Topology) -> None:
    """Send the pieces of slices to their ranks, and write those that arrive, in one collective: over all data ranks if
    they are of several groups, else over the ranks of an expert-parallel group."""
    group, device = topology.experts, slices[0].move.device
    if len(slices[0].tensor.ranges_GH2) > 1:
        group = topology.data
    leaving: list[list[torch.Tensor]] = [[] for _ in range(dist.get_world_size(group))]
    arriving: list[list[torch.Tensor]] = [[] for _ in leaving]
    for part in slices:
        for leaves, other, lines in _pieces(part, topology):
            (leaving if leaves else arriving)[other].append(lines)
    likes_sent, likes_received = (
        [[(piece.shape, piece.dtype) for piece in pieces] for pieces in side] for side in (leaving, arriving)
    )
    send_splits, receive_splits = ([packed_bytes(like) for like in likes] for likes in (likes_sent, likes_received))
    sent = torch.empty(sum(send_splits), dtype=torch.uint8, device=device)
    received = torch.empty(sum(receive_splits), dtype=torch.uint8, device=device)
    for buffer, pieces, like in zip(sent.split(send_splits), leaving, likes_sent, strict=True):
        for out, piece in zip(carve(buffer, like), pieces, strict=True):
            out.copy_(piece)
    dist.all_to_all_single(received, sent, receive_splits, send_splits, group=group)
    for buffer, pieces, like in zip(received.split(receive_splits), arriving, likes_received, strict=True):
        for value, piece in zip(carve(buffer, like), pieces, strict=True):
            piece.copy_(value)
