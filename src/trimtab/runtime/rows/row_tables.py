"""`RowTables`: where each row of a micro-step goes, in all layers; made on a thread while earlier layers compute.

The training thread makes those that it needs and the thread has not begun. Tables stay in host memory for further
passes over the micro-step, such as the update after the recompute of log-probabilities.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from trimtab.runtime.rows.layout import Layout
from trimtab.runtime.rows.physical_experts import PlannedRows
from trimtab.runtime.state.flat_memory import Packed

# Layers of the first chunks; the last number is that of all further chunks.
CHUNK_SIZES = (1, 1, 2, 4, 8)


@dataclass(frozen=True, eq=False)
class LayerTables:
    """The tables of one layer, on the host or on a device.

    Attributes:
        recorded_NK: `[n, K]` recorded ids in the dtype of the trace.
        known_N: `[n]` bool, whether the route of each token is known; None if all are.
        read_N: `[n]` bool, whether the output of each token is used; None if all are.
        num_read: tokens of known route whose output is used.
        layout: where the rows go; None if the micro-step is not planned, or rows may not be the planned ones.
        partial: the planned rows of a layer in which a rank has unknown ones, or rows may deviate; on the host.
    """

    recorded_NK: torch.Tensor
    known_N: torch.Tensor | None = None
    read_N: torch.Tensor | None = None
    num_read: int = 0
    layout: Layout | None = None
    partial: PlannedRows | None = None

    @property
    def rows(self) -> list[torch.Tensor]:
        """What a layer reads on its device, but for the ends of groups."""
        masks = [mask for mask in (self.known_N, self.read_N) if mask is not None]
        return [self.recorded_NK, *masks, *([] if self.layout is None else self.layout.rows)]

    @property
    def ends(self) -> list[torch.Tensor]:
        """The ends of groups, which autograd keeps longer."""
        return [] if self.layout is None else self.layout.ends

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        partial = 0 if self.partial is None else self.partial.physical_NK.nbytes
        return partial + sum(array.nbytes for array in (*self.rows, *self.ends))

    def moved(self, rows: Iterator[torch.Tensor], ends: Iterator[torch.Tensor]) -> LayerTables:
        """The same tables with the next of `rows` and `ends`, copies of its own."""
        recorded_NK, known_N = next(rows), None if self.known_N is None else next(rows)
        read_N = None if self.read_N is None else next(rows)
        layout = None if self.layout is None else self.layout.moved(rows, ends)
        return replace(self, recorded_NK=recorded_NK, known_N=known_N, read_N=read_N, layout=layout)


class Chunk:
    """The tables of consecutive layers on the host. Any thread can make them.

    Attributes:
        layers: numbers of the layers.
        packed: for a device, all `rows` and all `ends` of the tables, each in one piece of memory.
        nbytes: bytes of the tables; 0 until they are made.
    """

    def __init__(self, layers: range) -> None:
        self.layers = layers
        self.packed: list[Packed] = []
        self.nbytes = 0
        self._tables: list[LayerTables] | None = None
        self._lock = threading.Lock()

    @property
    def is_made(self) -> bool:
        """Whether the tables are made."""
        return self._tables is not None

    def tables(self, make: Callable[[int], LayerTables], pack_for: torch.device | None) -> list[LayerTables]:
        """The tables; makes them, or waits for the thread that does."""
        if self._tables is not None:
            return self._tables
        # A pass without gradients, in inference mode, may make what a later one saves for backward.
        with self._lock, torch.inference_mode(False):
            if self._tables is None:
                tables = [make(layer) for layer in self.layers]
                if pack_for is not None:
                    parts = ([a for table in tables for a in table.rows], [a for table in tables for a in table.ends])
                    self.packed = [Packed.of(part, pack_for) for part in parts]
                    tables = moved(tables, [packed.tensors for packed in self.packed])
                self.nbytes = sum(table.nbytes for table in tables)
                self._tables = tables
            return self._tables


class RowTables:
    """The tables of one micro-step on the host.

    Args:
        make: makes those of one layer; called by any thread.
        pack_for: a device that they are uploaded to; None if it is the host.
    """

    def __init__(self, make: Callable[[int], LayerTables], num_layers: int, pack_for: torch.device | None) -> None:
        self._make, self._pack_for = make, pack_for
        self.chunks = [Chunk(layers) for layers in chunks_of(num_layers)]
        self._chunk_of = [number for number, chunk in enumerate(self.chunks) for _ in chunk.layers]

    def number_of(self, layer: int) -> int:
        """The number of a layer's chunk."""
        return self._chunk_of[layer]

    def of_chunk(self, number: int) -> list[LayerTables]:
        """The tables of a chunk; makes them, or waits for the thread that does."""
        return self.chunks[number].tables(self._make, self._pack_for)

    def of(self, layer: int) -> LayerTables:
        """The tables of a layer on the host."""
        number = self._chunk_of[layer]
        return self.of_chunk(number)[layer - self.chunks[number].layers.start]

    def make_all(self) -> None:
        """Make all tables, in the order of layers."""
        for number in range(len(self.chunks)):
            self.of_chunk(number)

    @property
    def is_made(self) -> bool:
        """Whether all tables are made."""
        return all(chunk.is_made for chunk in self.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables that are made."""
        return sum(chunk.nbytes for chunk in self.chunks)


def moved(tables: Iterable[LayerTables], copies: Sequence[Sequence[torch.Tensor]]) -> list[LayerTables]:
    """Tables with copies of their arrays.

    Args:
        copies: of all `rows`, and of all `ends`.
    """
    rows, ends = map(iter, copies)
    return [table.moved(rows, ends) for table in tables]


def chunks_of(num_layers: int) -> list[range]:
    """Layers that are made and uploaded together: few at the beginning, for which the first layers wait."""
    chunks: list[range] = []
    while not chunks or chunks[-1].stop < num_layers:
        start = chunks[-1].stop if chunks else 0
        size = CHUNK_SIZES[min(len(chunks), len(CHUNK_SIZES) - 1)]
        chunks.append(range(start, min(start + size, num_layers)))
    return chunks
