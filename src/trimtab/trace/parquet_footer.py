"""What a Parquet file claims of its columns, in its footer and before every page, read without Arrow.

Arrow ends the process for some damaged footers when it is asked for a column (`RowGroupMetaData.column`): an exception
of C++ has no way out there. And it allocates what a page claims, whatever the footer does. So claims are read here,
before Arrow reads any data. The format is Thrift's compact protocol:
github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md; fields are those of
github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trimtab.errors import InputError

MAGIC = b"PAR1"
# Numbers of the fields that are read: of the footer, a row group, a column, and its metadata.
ROW_GROUPS, COLUMNS, META_DATA, PATH, NUM_VALUES, UNCOMPRESSED = 4, 1, 3, 3, 5, 6
COMPRESSED, FIRST_DATA_PAGE, DICTIONARY_PAGE = 7, 9, 11
# Of the header of a page: its sizes, and headers of its kinds, whose first field is the number of values.
PAGE_UNCOMPRESSED, PAGE_COMPRESSED = 2, 3
DATA_HEADERS, DICTIONARY_HEADER = (5, 8), 7
# Longest header of a page; and so many bytes a page has on average, with its part of the footer.
HEADER_BYTES, BYTES_A_PAGE = 64 << 10, 32
# Types of the compact protocol.
STOP, TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(13)
# Structs and lists in each other.
MOST_LEVELS = 32


class Column(NamedTuple):
    """A column of a row group: its path, and the values and uncompressed bytes that it claims to have.

    These are the larger ones of those in the footer and those of its pages.
    """

    path: str
    num_values: int
    uncompressed_bytes: int


def read_columns(path: Path) -> list[list[Column]]:
    """The columns of every row group of a file. Raises InputError if it has no readable footer or pages."""
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
            pages = _Pages(file, size)
            return [[_column(column[META_DATA], pages) for column in group[COLUMNS]] for group in footer[ROW_GROUPS]]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("not a readable Parquet file (its footer is damaged)") from None


def _column(metadata: dict[int, Any], pages: _Pages) -> Column:
    path = b".".join(metadata[PATH]).decode()
    sizes = [int(metadata[number]) for number in (NUM_VALUES, UNCOMPRESSED, COMPRESSED, FIRST_DATA_PAGE)]
    if min(sizes) < 0:
        raise InputError(f"not a readable Parquet file (column {path} has a negative size)")
    num_values, uncompressed, compressed, start = sizes
    if 0 < (dictionary := int(metadata.get(DICTIONARY_PAGE, 0))) < start:
        start = dictionary
    of_pages = pages.claims(start, start + compressed)
    return Column(path, max(num_values, of_pages[0]), max(uncompressed, of_pages[1]))


class _Pages:
    """Headers of the pages of a file; InputError if a file of its size can't have so many."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._most = 64 + size // BYTES_A_PAGE

    def claims(self, start: int, end: int) -> tuple[int, int]:
        """Values and uncompressed bytes of the pages of a column, by their headers. Values of a dictionary count if
        there are more of them."""
        values = in_dictionary = uncompressed = 0
        while start < end:
            header, length = self._header(start)
            sizes = header[PAGE_UNCOMPRESSED], header[PAGE_COMPRESSED]
            counts = [header[number][1] for number in DATA_HEADERS if number in header]
            in_dictionary = max(in_dictionary, header.get(DICTIONARY_HEADER, {1: 0})[1])
            if min(*sizes, *counts, in_dictionary) < 0:
                raise ValueError("a negative size")
            values, uncompressed = values + sum(counts), uncompressed + sizes[0]
            start += length + sizes[1]
        return max(values, in_dictionary), uncompressed

    def _header(self, start: int) -> tuple[dict[int, Any], int]:
        """The header of the page at a place of the file, and its length."""
        self._most -= 1
        if self._most < 0:
            raise InputError("the file claims to have more pages than a file of its size can hold")
        self._file.seek(start)
        reader = _Reader(self._file.read(HEADER_BYTES))
        return reader.struct(0), reader.position


class _Reader:
    """Values of the compact protocol, one after another; ValueError or IndexError where there are none.

    Every value takes a byte or more, so that no count makes it work beyond the end of the data.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def position(self) -> int:
        """Bytes read so far."""
        return self._at

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
