"""Reader of JSON of any size, one value at a time: JSON lines, one array of values, or one value over many lines."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, cast

from trimtab.errors import InputError
from trimtab.trace.message_text import reason

_READ_AT_ONCE = 8 << 20
_HEAD = 1 << 20
_GZIP = b"\x1f\x8b"
# Of the first two bytes of text in UTF-16, as PowerShell writes.
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
UTF16 = "text in UTF-16; convert it to UTF-8, for example with: iconv -f UTF-16 -t UTF-8"
_BLANK = re.compile(r"\s*")
# Decoder errors of text that may only be incomplete: at the end, or inside a string.
_NEAR_END = 16


def json_head(path: Path) -> bytes:
    """The first megabyte of a JSON file, unzipped if compressed; empty for other files. Never raises."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
        if head.startswith(_GZIP):
            head = zlib.decompressobj(31).decompress(head, _HEAD)
    except (OSError, ValueError, zlib.error):
        return b""
    return head if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[") else b""


def json_values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the place ("line 3", or "item 5" of an array) and the value. Memory: one value, and 8 MB.

    Values are separated by whitespace only. The items of a top-level array are yielded one by one.

    Raises:
        InputError: if the file isn't JSON, or is cut off.
    """
    with _naming_damage(), io.TextIOWrapper(_open(path), "utf-8-sig", newline="\n") as file:
        text = _Text(file)
        while sign := text.next_sign():
            if sign == "[":
                yield from _items(text)
            else:
                yield f"line {text.line}", text.value(f"line {text.line}")


def _items(text: _Text) -> Iterator[tuple[str, Any]]:
    sign = text.next_sign(skip=1)
    for item in count(1):
        where = f"item {item}"
        if item > 1 or sign != "]":
            yield where, text.value(where)
        sign = text.next_sign()
        if sign not in (",", "]"):
            raise InputError(f"{where}: {'no comma after it' if sign else 'the array is cut off'}")
        text.next_sign(skip=1)
        if sign == "]":
            return


class _Text:
    """The current part of a file's text.

    Attributes:
        line: of the next character.
    """

    def __init__(self, file: io.TextIOBase) -> None:
        self._file = file
        self._text, self._at, self._ended = "", 0, False
        self._decode = json.JSONDecoder().raw_decode
        self.line = 1

    def next_sign(self, skip: int = 0) -> str:
        """The next non-blank character behind so many others, without consuming it; "" at the end."""
        self._at += skip
        while True:
            self._advance(_BLANK.match(self._text, self._at).end())  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def value(self, where: str) -> Any:
        """The next value, at which the text must be. Errors begin with `where`."""
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as error:
                cut_off = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _NEAR_END
                if cut_off and self._read_more():
                    continue
                raise _refused(error, where, "cut off" if cut_off else "") from None
            except (RecursionError, ValueError) as error:
                raise _refused(error, where) from None
            if end == len(self._text) and not self._ended and not isinstance(value, dict | list | str):
                self._read_more()  # a number may continue
                continue
            self._advance(end)
            return value

    def _advance(self, end: int) -> None:
        self.line += self._text.count("\n", self._at, end)
        self._at = end

    def _read_more(self) -> bool:
        """Read more, doubling the text each time; False at the end of the file."""
        if self._ended:
            return False
        left = self._text[self._at :]
        self._text, self._at = "", 0
        read = self._file.read(max(_READ_AT_ONCE, len(left)))
        self._ended = not read
        self._text = left + read
        return bool(read)


def json_lines(path: Path) -> Iterator[bytes]:
    """Lines of a file, unzipped if compressed, with line ends. Raises InputError if it can't be read."""
    with _naming_damage(), _open(path) as file:
        for line in file:
            yield line if line.endswith(b"\n") else line + b"\n"


def one_value(text: bytes, where: str) -> Any:
    """The JSON value in a line. Raises InputError that begins with `where`."""
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        raise _refused(error, where) from None


def _refused(error: Exception, where: str, problem: str = "") -> InputError:
    """The error of a value that can't be decoded."""
    if isinstance(error, json.JSONDecodeError):
        return InputError(f"{where}: not valid JSON ({problem or error.msg[0].lower() + error.msg[1:]})")
    if isinstance(error, RecursionError):
        return InputError(f"{where}: JSON nested too deep")
    is_bytes = isinstance(error, UnicodeDecodeError)
    return InputError(f"{where}: {'not UTF-8 text' if is_bytes else 'a number of thousands of digits'}")


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        zipped = file.read(2) == _GZIP
    return cast(BinaryIO, gzip.open(path)) if zipped else path.open("rb")


@contextmanager
def _naming_damage() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        is_utf16 = error.object[:2] in UTF16_MARKS
        raise InputError(UTF16 if is_utf16 else f"not UTF-8 text ({error.reason})") from None
    except (EOFError, OSError, zlib.error) as error:
        raise InputError(f"can't be read ({reason(error)})") from None
