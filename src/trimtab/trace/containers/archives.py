"""Entries of zip files (torch files and `.npz`) as views of the mapped file.

Uncompressed entries, as written by `torch.save` and `np.savez`, are views of the file and are not copied.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from dataclasses import dataclass

from trimtab.errors import InputError

MAGIC = b"PK\x03\x04"
STORED, DEFLATED = 0, 8
MOST_ENTRIES = 1 << 19
# A compressed entry, as written by `np.savez_compressed`, is kept in memory.
MOST_INFLATED_BYTES = 1 << 30

_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_LONGEST_COMMENT = 1 << 16
_CHECKED_AT_ONCE = 64 << 20


@dataclass(frozen=True)
class Entry:
    """One entry: `method` (stored or deflated), sizes in bytes, CRC-32 of the content, offset of its local header."""

    name: str
    method: int
    checksum: int
    packed_size: int
    size: int
    offset: int


class Archive:
    """The entries of a zip file, by name.

    Raises:
        InputError: if the list of entries, or an entry passed to `view`, is damaged.
    """

    def __init__(self, file: memoryview) -> None:
        self._file = file
        self._checked: set[str] = set()
        try:
            self.entries = {entry.name: entry for entry in _list_entries(file)}
        except (struct.error, UnicodeDecodeError):
            raise InputError("a damaged zip file: its list of entries can't be read") from None

    def view(self, name: str) -> memoryview:
        """The content of an entry; a view of the file if it is stored. Its checksum is compared once."""
        entry = self.entries.get(name)
        if entry is None:
            raise InputError(f"a damaged file: its entry {name[:80]!r} is missing")
        content = self._packed(entry)
        if entry.method == DEFLATED:
            content = _inflate(entry, content)
        elif entry.method != STORED or entry.packed_size != entry.size:
            raise InputError(f"its entry {name[:80]!r} is packed in a way that torch and numpy don't use")
        if name not in self._checked:
            if _checksum(content) != entry.checksum:
                raise InputError(
                    f"a damaged file: the checksum of its entry {name[:80]!r} does not match (files that were saved "
                    "with torch.serialization.set_crc32_options(False) must be saved again)"
                )
            self._checked.add(name)
        return content

    def _packed(self, entry: Entry) -> memoryview:
        try:
            header = _LOCAL.unpack_from(self._file, entry.offset)
        except struct.error:
            header = (b"",)
        start = entry.offset + _LOCAL.size + sum(header[-2:]) if header[0] == MAGIC else len(self._file) + 1
        if start + entry.packed_size > len(self._file):
            raise InputError(f"a damaged or truncated file: its entry {entry.name[:80]!r} lies beyond its end")
        return self._file[start : start + entry.packed_size]


def release_pages(view: memoryview) -> None:
    """Release the file's pages, which count as this process's memory. They are read again when needed."""
    if isinstance(view.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        view.obj.madvise(mmap.MADV_DONTNEED)


def _checksum(content: memoryview) -> int:
    checksum = 0
    for start in range(0, len(content), _CHECKED_AT_ONCE):
        checksum = zlib.crc32(content[start : start + _CHECKED_AT_ONCE], checksum)
        if start:
            release_pages(content)
    return checksum


def _inflate(entry: Entry, packed: memoryview) -> memoryview:
    if entry.size > MOST_INFLATED_BYTES:
        raise InputError(
            f"its entry {entry.name[:80]!r} is compressed and claims {entry.size} bytes; compressed arrays may have "
            f"{MOST_INFLATED_BYTES >> 20} MiB: save it with np.savez"
        )
    try:
        content = zlib.decompressobj(-15).decompress(packed, entry.size + 1)
    except zlib.error:
        content = b""
    if len(content) != entry.size:
        raise InputError(f"a damaged file: its entry {entry.name[:80]!r} can't be unpacked")
    return memoryview(content)


def _list_entries(file: memoryview) -> list[Entry]:
    tail_start = max(0, len(file) - _END.size - _LONGEST_COMMENT)
    end = bytes(file[tail_start:]).rfind(b"PK\x05\x06")
    if end < 0:
        raise InputError("a truncated file: the list of entries at its end is missing")
    end += tail_start
    *_, count, size, start, _ = _END.unpack_from(file, end)
    locator = end - _LOCATOR_64.size
    if locator >= 0 and bytes(file[locator : locator + 4]) == b"PK\x06\x07":
        fields = _END_64.unpack_from(file, _LOCATOR_64.unpack_from(file, locator)[2])
        if fields[0] != b"PK\x06\x06":
            raise InputError("a damaged zip file: its list of entries can't be read")
        count, size, start = fields[-3:]
    if count > MOST_ENTRIES or start + size > len(file) or count * _ENTRY.size > size:
        raise InputError(f"a damaged zip file: it claims {count} entries")
    entries = []
    at = start
    for _ in range(count):
        entry, at = _read_entry(file, at)
        entries.append(entry)
    return entries


def _read_entry(file: memoryview, at: int) -> tuple[Entry, int]:
    sign, _, _, flags, method, _, _, checksum, packed, size, name_size, extra_size, comment_size, _, _, _, offset = (
        _ENTRY.unpack_from(file, at)
    )
    if sign != b"PK\x01\x02" or flags & 1:
        raise InputError("a damaged or encrypted zip file: its list of entries can't be read")
    at += _ENTRY.size
    name = bytes(file[at : at + name_size]).decode()
    at += name_size
    extra = bytes(file[at : at + extra_size])
    # Sizes that do not fit are in a separate field, in this order.
    wide = iter(_wide_sizes(extra))
    size, packed, offset = (next(wide, field) if field == 0xFFFFFFFF else field for field in (size, packed, offset))
    return Entry(name, method, checksum, packed, size, offset), at + extra_size + comment_size


def _wide_sizes(extra: bytes) -> list[int]:
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            fields = extra[at + 4 : at + 4 + size]
            return [number for (number,) in struct.iter_unpack("<Q", fields[: len(fields) // 8 * 8])]
        at += 4 + size
    return []
