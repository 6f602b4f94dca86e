"""Messages between attention ranks and expert ranks: a header and rows in one buffer of bytes.

A message is received into a buffer with the capacity of its micro-batch, so sizes never travel ahead of it; only the
bytes in use are sent. Messages are in host memory and go over gloo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from trimtab.errors import RanksDisagreeError

HEADER_BYTES = 64
# Kinds of messages. A micro-batch of a rank ends with `END`.
REQUEST, ANSWER, END = 1, 2, 3


class Header(NamedTuple):
    """What a message is.

    Attributes:
        kind: `REQUEST`, `ANSWER` or `END`.
        micro_batch: number of the micro-batch.
        call: number of MoE calls of the micro-batch before this one.
        rows: tokens in the message.
    """

    kind: int
    micro_batch: int
    call: int
    rows: int = 0

    def write(self, buffer: torch.Tensor) -> None:
        """Write the header to the start of a buffer `[n]` uint8."""
        buffer[:HEADER_BYTES].view(torch.int64)[:5] = torch.tensor([*self, hash(self)])

    @classmethod
    def read(cls, buffer: torch.Tensor, expected: Header, capacity: int, sender: int) -> Header:
        """The header of a buffer.

        Args:
            expected: its rows are not compared; a `REQUEST` may also be an `END`.
            capacity: most rows.
            sender: the rank, for the message of the error.

        Raises:
            RanksDisagreeError: if it is another message than the expected one, or altered.
        """
        *values, check = buffer[:HEADER_BYTES].view(torch.int64)[:5].tolist()
        header = cls(*values)
        kinds = (REQUEST, END) if expected.kind == REQUEST else (expected.kind,)
        is_next = (header.micro_batch, header.call) == (expected.micro_batch, expected.call)
        if check != hash(header) or header.kind not in kinds or not is_next or not 0 <= header.rows <= capacity:
            raise RanksDisagreeError(
                f"rank {sender} sent {header} of at most {capacity} rows, where {expected} was expected"
            )
        return header


@dataclass(frozen=True)
class RowFormat:
    """Bytes of a token's row.

    Attributes:
        hidden: size of hidden states.
        top_k: experts of a token.
        dtype: of hidden states.
    """

    hidden: int
    top_k: int
    dtype: torch.dtype

    def request(self, rows: int) -> torch.Tensor:
        """A buffer for a request of so many rows."""
        row = self.top_k * (self.weight_dtype.itemsize + 2) + self.hidden * self.dtype.itemsize
        return torch.empty(HEADER_BYTES + rows * row, dtype=torch.uint8)

    def answer(self, rows: int) -> torch.Tensor:
        """A buffer for an answer of so many rows."""
        return torch.empty(HEADER_BYTES + rows * self.hidden * self.dtype.itemsize, dtype=torch.uint8)

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of router weights, not narrower than hidden states."""
        return torch.promote_types(self.dtype, torch.float32)

    def request_parts(self, buffer: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Views of router weights `[rows, K]`, hidden states `[rows, H]` and slots `[rows, K]` int16, and their end.

        A slot is -1 where an expert is not on the rank.
        """
        weights_at = HEADER_BYTES + rows * self.top_k * self.weight_dtype.itemsize
        hidden_at = weights_at + rows * self.hidden * self.dtype.itemsize
        end = hidden_at + rows * self.top_k * 2
        weights = buffer[HEADER_BYTES:weights_at].view(self.weight_dtype).view(rows, self.top_k)
        hidden = buffer[weights_at:hidden_at].view(self.dtype).view(rows, self.hidden)
        return weights, hidden, buffer[hidden_at:end].view(torch.int16).view(rows, self.top_k), end

    def answer_rows(self, buffer: torch.Tensor, rows: int) -> tuple[torch.Tensor, int]:
        """A view of the weighted sums `[rows, H]`, and its end."""
        end = HEADER_BYTES + rows * self.hidden * self.dtype.itemsize
        return buffer[HEADER_BYTES:end].view(self.dtype).view(rows, self.hidden), end
