"""Writes of files: another process sees the old file or the complete new one. Pipes and devices are written into."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from trimtab.errors import InputError

# A path that stands for standard output, where figures may be written to.
STDOUT = Path("-")

# No rights, a folder instead of a file or the reverse, no folder, a name that is too long, links in a circle, a file
# opened for reading; full or read-only disk, quota, or shell limit.
UNWRITABLE = (
    errno.EACCES, errno.EPERM, errno.EEXIST, errno.EISDIR, errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG,
    errno.ELOOP, errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EROFS,
)  # fmt: skip


# Of files that people write, such as a model's config.json: far more than any has.
MOST_TEXT_BYTES = 16 << 20


def read_small_text(path: Path) -> str:
    """The text of a file that may come from a stranger, in UTF-8.

    Raises:
        InputError: one line, if it is not a regular file, has more than `MOST_TEXT_BYTES`, or can't be read as text.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: not a regular file")
    try:
        with path.open("rb") as file:
            content = file.read(MOST_TEXT_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read as text ({' '.join(str(error).split())})") from None
    if len(content) > MOST_TEXT_BYTES:
        raise InputError(f"{path}: larger than {MOST_TEXT_BYTES >> 20} MB, which no such file is")
    return text


def write_problem(error: OSError, default: object) -> str | None:
    """The line for a user whose file can't be written; None if the error has another reason.

    Args:
        default: names the file if the error does not, as on a full disk.
    """
    return f"{error.filename or default}: {error.strerror}" if error.errno in UNWRITABLE else None


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A context with a new binary file that becomes `path` at the end, and is deleted on an error.

    A regular file is replaced, and missing folders are created. A symbolic link stays; its target is replaced. Into
    pipes, character devices and open files such as /dev/stdout the content is written at the end.

    Raises:
        InputError: if the path is a folder, a block device or a socket.
    """
    path = Path(path)
    try:
        with _stream_into(path) if is_stream(path) else _replacement_of(path) as file:
            yield file
    except OSError as error:
        # On a full disk the error of `write` has no file name.
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def is_stream(path: Path) -> bool:
    """Whether content is written into what the path names, which can't be replaced or read back.

    Raises:
        InputError: if it is a folder, a block device or a socket.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    is_open = _descriptor(path) is not None
    for matches, kind in ((stat.S_ISDIR, "a folder"), (stat.S_ISBLK, "a block device"), (stat.S_ISSOCK, "a socket")):
        if matches(mode) and not (is_open and kind == "a socket"):
            raise InputError(f"{path}: {kind}; name the file to write")
    return is_open or not stat.S_ISREG(mode)


def _descriptor(path: Path) -> int | None:
    """The number of the open file that a path such as /dev/stdout or /dev/fd/1 names; None if it names no such file."""
    for each in (path, path.parent / os.readlink(path)) if path.is_symlink() else (path,):
        if os.path.realpath(each.parent) == f"/proc/{os.getpid()}/fd":
            return int(each.name)
    return None


@contextmanager
def _replacement_of(path: Path) -> Iterator[BinaryIO]:
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    target.parent.mkdir(parents=True, exist_ok=True)
    # An unpredictable name, opened without following links: another user may have made a link of that name.
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    opened = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with os.fdopen(opened, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _stream_into(path: Path) -> Iterator[BinaryIO]:
    # Through a temporary file, since writers of archives seek.
    with tempfile.TemporaryFile() as file:
        yield file
        file.seek(0)
        # What was printed before comes first, if the path is standard output.
        sys.stdout.flush()
        number = _descriptor(path)
        # A copy of an open file's number continues at its position; opening its path would begin at the start.
        opened = os.open(path, os.O_WRONLY) if number is None else os.dup(number)
        with os.fdopen(opened, "wb") as stream:
            shutil.copyfileobj(file, stream)


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file as `atomic_file` does, text as UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def json_text(content: Mapping[str, Any]) -> str:
    """The text of a JSON file, ASCII alone."""
    return json.dumps(content, indent=2) + "\n"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as `atomic_file` does, or to standard output if the path is `STDOUT`."""
    text = json_text(content)
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        write_atomically(path, text)
