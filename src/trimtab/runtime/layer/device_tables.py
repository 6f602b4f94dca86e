"""`DeviceTables`: the row tables of a micro-step on a device, uploaded on a side stream before layers need them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.runtime.rows.row_tables import LayerTables, RowTables, moved
from trimtab.runtime.state.flat_memory import carve
from trimtab.runtime.transfer.streams import BackgroundCopies, Wait


@dataclass(eq=False)
class _Uploaded:
    """The tables of a chunk on the device, and the wait for their upload; None once something has waited."""

    tables: list[LayerTables]
    wait: Wait | None


class DeviceTables:
    """The tables of one micro-step, for one use of it.

    Args:
        tables: those on the host.
        copies: uploads them; None if layers read them on the host.
    """

    def __init__(self, tables: RowTables, copies: BackgroundCopies | None) -> None:
        self._tables, self._copies = tables, copies
        self._uploaded: dict[int, _Uploaded] = {}

    def of(self, layer: int) -> LayerTables:
        """The tables of a layer. Compute that is queued from now on waits for their upload."""
        if self._copies is None:
            return self._tables.of(layer)
        number, chunks = self._tables.number_of(layer), self._tables.chunks
        self._upload(number, self._copies)
        for other, chunk in enumerate(chunks):
            if chunk.is_made:
                self._upload(other, self._copies)
        uploaded = self._uploaded[number]
        if uploaded.wait is not None:
            uploaded.wait()
            uploaded.wait = None
        return uploaded.tables[layer - chunks[number].layers.start]

    def _upload(self, number: int, copies: BackgroundCopies) -> None:
        if number in self._uploaded:
            return
        host, packed = self._tables.of_chunk(number), self._tables.chunks[number].packed
        with torch.inference_mode(False):
            memories, wait = copies.upload([each.memory for each in packed])
            arrays = [carve(memory, each.like) for memory, each in zip(memories, packed, strict=True)]
        self._uploaded[number] = _Uploaded(moved(host, arrays), wait)
