"""`Channel`: messages between an attention rank and an expert rank, each a header and rows in one buffer of bytes.

A request has router weights, hidden states, and slots of experts on the rank, -1 for experts that are not there. Its
answer has weighted sums. A message is received into a buffer with the capacity of its micro-batch, so sizes never
travel ahead of it; only the bytes in use are sent. Messages are in host memory and go over gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from trimtab.errors import RanksDisagreeError
from trimtab.runtime.state.flat_memory import Like, carve, packed_bytes

Columns = Sequence[tuple[int, torch.dtype]]
"""Width and dtype of each part of a row."""

# Number of rows in a message that is the last one of its micro-batch.
END = -1
# Micro-batch, number of the message, rows, and a checksum of them.
HEADER: Like = ((4,), torch.int64)


class Channel:
    """Messages of one micro-batch to and from one rank.

    Args:
        rank: the other rank.
        micro_batch: number of the micro-batch.
        capacity: most rows of a message.
        sent, received: columns in either direction.
    """

    def __init__(self, rank: int, micro_batch: int, capacity: int, sent: Columns, received: Columns) -> None:
        self._rank, self.micro_batch, self._capacity = rank, micro_batch, capacity
        self._sent, self._received = sent, received
        self._outgoing = torch.empty(packed_bytes(_like(sent, capacity)), dtype=torch.uint8)
        self._incoming = torch.empty(packed_bytes(_like(received, capacity)), dtype=torch.uint8)
        self._sent_count, self._received_count = count(), count()
        self._sending: Any = None

    def listen(self) -> None:
        """Start to receive the next message."""
        self._receiving: Any = dist.irecv(self._incoming, self._rank, tag=self.micro_batch)

    def send(self, *columns: torch.Tensor) -> None:
        """Start to send columns `[rows, width]`, which are copied; send the end of the micro-batch without columns."""
        if self._sending is not None:
            self._sending.wait()
        header = self.micro_batch, next(self._sent_count), len(columns[0]) if columns else END
        like = _like(self._sent if columns else (), header[2])
        sources = torch.tensor([*header, hash(header)]), *columns
        for target, source in zip(carve(self._outgoing, like), sources, strict=True):
            target.copy_(source)
        self._sending = dist.isend(self._outgoing[: packed_bytes(like)], self._rank, tag=self.micro_batch)
        if not columns:
            self._sending.wait()

    def receive(self) -> list[torch.Tensor] | None:
        """Columns `[rows, width]` of the next message, valid until `listen`; None if it ends the micro-batch.

        Raises:
            RanksDisagreeError: if it is another message, or altered.
        """
        self._receiving.wait()
        *header, rows, check = carve(self._incoming, [HEADER])[0].tolist()
        expected = [self.micro_batch, next(self._received_count)]
        if header != expected or not END <= rows <= self._capacity or check != hash((*expected, rows)):
            raise RanksDisagreeError(
                f"rank {self._rank} sent {rows} rows as micro-batch and message {header}, where at most "
                f"{self._capacity} as {expected} were expected"
            )
        return None if rows == END else carve(self._incoming, _like(self._received, rows))[1:]


def _like(columns: Columns, rows: int) -> list[Like]:
    return [HEADER, *(((rows, width), dtype) for width, dtype in columns)]
