"""`Programs`: the programs of all layers of a micro-step, made on a thread while earlier layers compute.

The training thread makes those that it needs and the thread has not begun. Programs stay in host memory for further
passes over the micro-step, such as the update after the recompute of log-probabilities.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from trimtab.runtime.program.program import Program
from trimtab.runtime.state.flat_memory import Packed, carve
from trimtab.runtime.transfer.streams import BackgroundCopies, Wait


@dataclass(eq=False)
class _Chunk:
    """Consecutive layers whose programs are made and uploaded together.

    Attributes:
        layers: their numbers.
        packed: for a device, all tensors of the programs in one piece of memory.
        nbytes: bytes of the programs; 0 until they are made.
    """

    layers: range
    packed: Packed | None = None
    nbytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Programs:
    """The programs of one micro-step on the host. Any thread can make them.

    Args:
        make: makes that of one layer.
        pack_for: a device that they are uploaded to; None if it is the host.
    """

    def __init__(self, make: Callable[[int], Program], num_layers: int, pack_for: torch.device | None) -> None:
        self._make, self._pack_for = make, pack_for
        self.chunks = [_Chunk(layers) for layers in chunks_of(num_layers)]
        self.chunk_of = [chunk for chunk in self.chunks for _ in chunk.layers]
        self._made: list[Program | None] = [None] * num_layers

    def of(self, layer: int) -> Program:
        """The program of a layer; makes it, or waits for the thread that does."""
        return self._made[layer] or self._make_chunk(self.chunk_of[layer], layer)

    def make_all(self) -> None:
        """Make all programs, in the order of layers."""
        for chunk in self.chunks:
            self.of(chunk.layers.start)

    @property
    def is_made(self) -> bool:
        """Whether all programs are made."""
        return all(self._made)

    @property
    def nbytes(self) -> int:
        """Bytes of the programs that are made."""
        return sum(chunk.nbytes for chunk in self.chunks)

    def _make_chunk(self, chunk: _Chunk, layer: int) -> Program:
        # A pass without gradients, in inference mode, may make what a later one saves for backward.
        with chunk.lock, torch.inference_mode(False):
            if not chunk.nbytes:
                made = [self._make(number) for number in chunk.layers]
                if self._pack_for is not None:
                    chunk.packed = Packed.of([t for program in made for t in program.tensors], self._pack_for)
                    packed = iter(chunk.packed.tensors)
                    made = [program.moved(packed) for program in made]
                # Before other threads see the programs.
                chunk.nbytes = max(1, sum(program.nbytes for program in made))
                self._made[chunk.layers.start : chunk.layers.stop] = made
        program = self._made[layer]
        assert program is not None
        return program


class UploadedPrograms:
    """The programs of one micro-step on a device, for one use of it.

    Args:
        programs: those on the host.
        copies: uploads them.
    """

    def __init__(self, programs: Programs, copies: BackgroundCopies) -> None:
        self._programs, self._copies = programs, copies
        # By layer; and by chunk the waits for their uploads, until something has waited.
        self._uploaded: dict[int, Program] = {}
        self._waits: dict[_Chunk, Wait] = {}

    def of(self, layer: int) -> Program:
        """The program of a layer. Compute that is queued from now on waits for its upload."""
        chunk = self._programs.chunk_of[layer]
        if layer not in self._uploaded or chunk in self._waits:
            self._programs.of(layer)
            for other in self._programs.chunks:
                if other.nbytes and other.layers.start not in self._uploaded:
                    self._upload(other)
            self._waits.pop(chunk)()
        return self._uploaded[layer]

    @property
    def device_bytes(self) -> int:
        """Bytes of the uploaded programs."""
        return sum(program.nbytes for program in self._uploaded.values())

    def _upload(self, chunk: _Chunk) -> None:
        assert chunk.packed is not None
        with torch.inference_mode(False):
            (memory,), self._waits[chunk] = self._copies.upload([chunk.packed.memory])
            copies = iter(carve(memory, chunk.packed.like))
        for layer in chunk.layers:
            self._uploaded[layer] = self._programs.of(layer).moved(copies)


def chunks_of(num_layers: int) -> list[range]:
    """Layers that are made and uploaded together: few at the beginning, for which the first layers wait."""
    starts = [start for start in (0, 1, 2, 4, *range(8, num_layers, 8)) if start < num_layers]
    return [range(*ends) for ends in pairwise([*starts, num_layers])]
