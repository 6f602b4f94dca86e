"""What the footer of a Parquet file claims of its columns, read without Arrow.

Arrow ends the process for some damaged footers when it is asked for a column (`RowGroupMetaData.column`): an exception
of C++ has no way out there. So claims are read here, before Arrow reads any data. The format is Thrift's compact
protocol: github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md; fields are those of
github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.errors import InputError

MAGIC = b"PAR1"
# Numbers of the fields that are read: of the footer, a row group, a column, and its metadata.
ROW_GROUPS, COLUMNS, META_DATA, PATH, NUM_VALUES, UNCOMPRESSED = 4, 1, 3, 3, 5, 6
# Types of the compact protocol.
STOP, TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(13)
# Structs and lists in each other.
MOST_LEVELS = 32


class Column(NamedTuple):
    """A column of a row group: its path, and the values and uncompressed bytes that it claims to have."""

    path: str
    num_values: int
    uncompressed_bytes: int


def read_columns(path: Path) -> list[list[Column]]:
    """The columns of every row group of a file.

    Raises:
        InputError: if it has no readable footer.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(max(0, size - 8))
            end = file.read(8)
            length = int.from_bytes(end[:4], "little")
            if end[4:] != MAGIC or length + 12 > size:
                raise InputError("not a readable Parquet file (it is cut off, or has no footer)")
            file.seek(size - 8 - length)
            footer = _Reader(file.read(length)).struct(0)
        return [[_column(column) for column in group[COLUMNS]] for group in footer[ROW_GROUPS]]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("not a readable Parquet file (its footer is damaged)") from None


def _column(chunk: dict[int, Any]) -> Column:
    metadata = chunk[META_DATA]
    found = Column(b".".join(metadata[PATH]).decode(), int(metadata[NUM_VALUES]), int(metadata[UNCOMPRESSED]))
    if min(found.num_values, found.uncompressed_bytes) < 0:
        raise InputError(f"not a readable Parquet file (column {found.path} has a negative size)")
    return found


class _Reader:
    """Values of the compact protocol, one after another; ValueError or IndexError where there are none.

    Every value takes a byte or more, so that no count makes it work beyond the end of the data.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def struct(self, level: int) -> dict[int, Any]:
        """The fields of a struct by number."""
        found: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            kind = head & 15
            found[number] = kind == TRUE if kind in (TRUE, FALSE) else self._value(kind, level)
        return found

    def _value(self, kind: int, level: int) -> Any:
        if level > MOST_LEVELS:
            raise ValueError("too many levels")
        if kind in (TRUE, FALSE, BYTE):
            return self._byte()
        if kind in (I16, I32, I64):
            return self._zigzag()
        if kind == DOUBLE:
            return self._bytes(8)
        if kind == BINARY:
            return self._bytes(self._number())
        if kind in (LIST, SET):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._number()
            return [self._value(head & 15, level + 1) for _ in range(count)]
        if kind == MAP:
            count = self._number()
            kinds = self._byte() if count else 0
            return [(self._value(kinds >> 4, level + 1), self._value(kinds & 15, level + 1)) for _ in range(count)]
        if kind == STRUCT:
            return self.struct(level + 1)
        raise ValueError(f"type {kind}")

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _bytes(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]

    def _number(self) -> int:
        """A number of 7 bits a byte, the lowest first, of 64 bits at most."""
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("too many bits")

    def _zigzag(self) -> int:
        value = self._number()
        return (value >> 1) ^ -(value & 1)
