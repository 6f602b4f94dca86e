"""Buffers as files, and entries of zip files (torch files and `.npz`) as views of the file, which are not copied."""

from __future__ import annotations

import mmap
import struct
import zipfile
import zlib

from trimtab.errors import InputError

ZIP_MAGIC = b"PK\x03\x04"
# Exceptions of zipfile and zlib for damaged files.
ZIP_ERRORS = (EOFError, NotImplementedError, OSError, OverflowError, RuntimeError, ValueError, struct.error,
              zipfile.BadZipFile, zlib.error)  # fmt: skip
_CHECKSUM_CHUNK = 64 << 20
_LONGEST_LINE = 512
_HELD = 4 << 20


class BufferFile:
    """A buffer as a file. Bytes that are claimed but not there take no memory, nor do those of a file once read.

    Attributes:
        at: the position.
    """

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._released = self.at = 0

    def seek(self, offset: int, whence: int = 0) -> None:
        at = offset + (0, self.at, len(self._content))[whence]
        if at < 0:
            raise OSError("a position before the start")
        self.at = at

    def tell(self) -> int:
        return self.at

    def peek(self, size: int | None = None) -> bytes:
        return bytes(self._content[self.at :][:size])

    def read(self, size: int | None = None) -> bytes:
        data = self.peek(size)
        self._advance(len(data))
        return data

    def readinto(self, target: memoryview) -> int:
        start = self.at
        for done in range(0, len(target), _HELD):
            data = self._content[self.at : start + min(done + _HELD, len(target))]
            target[done : done + len(data)] = data
            self._advance(len(data))
        return self.at - start

    def readline(self) -> bytes:
        """A line of at most 512 bytes; nothing where it is longer."""
        return self.read(self.peek(_LONGEST_LINE).find(b"\n") + 1)

    def _advance(self, size: int) -> None:
        self.at += size
        if self.at - self._released >= _HELD:
            release_pages(self._content)
            self._released = self.at


class Archive:
    """The entries of a zip file, by name.

    Raises:
        InputError: if the list of entries, or an entry passed to `view`, is damaged.
    """

    def __init__(self, file: memoryview) -> None:

        self._file = file
        self._checked: set[str] = set()
        try:
            self.entries = zipfile.ZipFile(BufferFile(file)).NameToInfo  # type: ignore[call-overload]
        except ZIP_ERRORS:
            raise InputError("a damaged or truncated zip file: its list of entries can't be read") from None

    def view(self, name: str) -> memoryview:
        """The content of an entry; a view of the file if it is not compressed. Its checksum is compared once."""
        entry = self.entries.get(name)
        if entry is None:
            raise InputError(f"a damaged file: its entry {name[:80]!r} is missing")
        content = self._stored(entry)
        if entry.compress_type == zipfile.ZIP_DEFLATED:
            content = _inflate(entry, content)
        elif entry.compress_type != zipfile.ZIP_STORED or len(content) != entry.file_size or entry.flag_bits & 1:
            raise InputError(f"its entry {name[:80]!r} is packed in a way that torch and numpy don't use")
        if name not in self._checked:
            if _checksum(content) != entry.CRC:
                raise InputError(
                    f"a damaged file: the checksum of its entry {name[:80]!r} does not match (files that were saved "
                    "with torch.serialization.set_crc32_options(False) must be saved again)"
                )
            self._checked.add(name)
        return content

    def _stored(self, entry: zipfile.ZipInfo) -> memoryview:
        """The bytes of an entry in the file, which follow its local header, name and extra field."""
        header = self._file[max(entry.header_offset, 0) :][:30]
        if len(header) == 30 and header[:4] == ZIP_MAGIC:
            start = entry.header_offset + 30 + sum(struct.unpack_from("<2H", header, 26))
            if start + entry.compress_size <= len(self._file):
                return self._file[start : start + entry.compress_size]
        raise InputError(f"a damaged or truncated file: its entry {entry.filename[:80]!r} lies beyond its end")


def release_pages(view: memoryview) -> None:
    """Release the file's pages, which count as this process's memory. They are read again when needed."""
    if isinstance(view.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        view.obj.madvise(mmap.MADV_DONTNEED)


def _checksum(content: memoryview) -> int:
    checksum = 0
    for start in range(0, len(content), _CHECKSUM_CHUNK):
        checksum = zlib.crc32(content[start : start + _CHECKSUM_CHUNK], checksum)
        if start:
            release_pages(content)
    return checksum


def _inflate(entry: zipfile.ZipInfo, packed: memoryview) -> memoryview:
    try:
        content = zlib.decompressobj(-15).decompress(packed, entry.file_size + 1)
    except zlib.error:
        content = b""
    if len(content) != entry.file_size:
        raise InputError(f"a damaged file: its entry {entry.filename[:80]!r} can't be unpacked")
    return memoryview(content)
