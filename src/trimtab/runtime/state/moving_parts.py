"""`move_parts`: moves rows of which each rank holds a part, such as those of a distributed optimizer.

Rank (g, r), rank r of expert-parallel group g, holds the part g of the rows of rank r's home experts. An expert that
moves from rank a, row i, to rank b, row j goes from all (g, a) to all (g', b): the elements that are in both the part g
of row i and the part g' of row j. If it keeps its row, these are whole parts and g = g'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.expert_state import RowParts
from trimtab.runtime.state.flat_memory import Like, carve, packed_bytes
from trimtab.runtime.state.home_experts import HomeExperts

# Most bytes that are exchanged at once, about.
ROUND_BYTES = 64 << 20


class _Row(NamedTuple):
    """A row: the rank that holds its parts, and its number there."""

    rank: int
    row: int


@dataclass(frozen=True, eq=False)
class _Moves:
    """The moving rows of one tensor, and a range of their elements.

    Attributes:
        rows: old and new row of each moving expert, ascending.
        first, end: elements that are exchanged together. Those of rows that leave and of rows that take their places
            are in one exchange, so none is overwritten before it was sent.
    """

    tensor: RowParts
    rows: list[tuple[_Row, _Row]]
    first: int
    end: int

    def pieces(self, topology: Topology) -> Iterator[tuple[bool, int, torch.Tensor]]:
        """Yields for each piece whether it leaves this rank, the data rank that it goes to or comes from, and its
        elements here. Both ranks have the pieces between them in the same order."""
        ranges_GH2, mine = self.tensor.ranges_GH2, topology.group
        for old, new in self.rows:
            for leaves, here, there in ((True, old, new), (False, new, old)):
                if here.rank != topology.rank:
                    continue
                start = ranges_GH2[mine, here.row, 0]
                for other in range(topology.groups):
                    first = max(self.first, start, ranges_GH2[other, there.row, 0])
                    end = min(self.end, ranges_GH2[mine, here.row, 1], ranges_GH2[other, there.row, 1])
                    if first < end:
                        elements = self.tensor.parts[here.row][first - start : end - start]
                        yield leaves, other * topology.num_ranks + there.rank, elements


def move_parts(layer: HomeExperts, new_E: Array, tensors: Sequence[RowParts], topology: Topology) -> Array:
    """Move the parts of the layer's moving rows. Collective over all data ranks.

    Args:
        new_E: `[E]`, the new homes; those of the layer are still the old ones.
        tensors: in the same order on all ranks.

    Returns:
        `[R]` bytes that each rank of an expert-parallel group sends, the mean over groups; the same on all ranks.
    """
    new_rows_E = layer.rows_after(new_E)
    moved = np.flatnonzero((layer.home_E != new_E) | (layer.rows_E != new_rows_E)).tolist()
    rows = [(_Row(int(layer.home_E[e]), int(layer.rows_E[e])), _Row(int(new_E[e]), int(new_rows_E[e]))) for e in moved]
    moved_R = np.bincount(layer.home_E[moved], minlength=topology.num_ranks)
    sent_R: Array = np.zeros(topology.num_ranks, np.int64)
    for tensor in tensors:
        elements = int(tensor.ranges_GH2[:, :, 1].max(initial=0))
        row_bytes = elements * tensor.parts[0].dtype.itemsize
        rounds = max(1, -(-int(moved_R.max()) * row_bytes // ROUND_BYTES))
        step = max(1, -(-elements // rounds))
        for first in range(0, elements, step):
            _exchange(_Moves(tensor, rows, first, min(first + step, elements)), topology)
        sent_R += moved_R * row_bytes // topology.groups
    return sent_R


def _exchange(moves: _Moves, topology: Topology) -> None:
    """Send all pieces of the moves, and write those that arrive."""
    leaving: list[list[torch.Tensor]] = [[] for _ in range(topology.num_data_ranks)]
    arriving: list[list[torch.Tensor]] = [[] for _ in range(topology.num_data_ranks)]
    for leaves, other, elements in moves.pieces(topology):
        (leaving if leaves else arriving)[other].append(elements)
    like = moves.tensor.parts[0]

    def likes(pieces: list[torch.Tensor]) -> list[Like]:
        return [((len(piece),), piece.dtype) for piece in pieces]

    send_splits, receive_splits = ([packed_bytes(likes(pieces)) for pieces in each] for each in (leaving, arriving))
    sent = torch.empty(sum(send_splits), dtype=torch.uint8, device=like.device)
    received = torch.empty(sum(receive_splits), dtype=torch.uint8, device=like.device)
    for buffer, pieces in zip(sent.split(send_splits), leaving, strict=True):
        for place, piece in zip(carve(buffer, likes(pieces)), pieces, strict=True):
            place.copy_(piece)
    dist.all_to_all_single(received, sent, receive_splits, send_splits, group=topology.data)
    for buffer, pieces in zip(received.split(receive_splits), arriving, strict=True):
        for place, piece in zip(carve(buffer, likes(pieces)), pieces, strict=True):
            piece.copy_(place)
