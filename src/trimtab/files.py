"""Atomic writes of files: another process sees the old file or the complete new one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

# A path that stands for standard output, where figures may be written to.
STDOUT = Path("-")


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A context with a new binary file: renamed to `path` at the end, deleted on an error. Creates missing folders."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        # On a full disk the error of `write` has no file name.
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file atomically, text as UTF-8. Creates missing folders."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically, or to standard output if the path is `STDOUT`."""
    text = json.dumps(content, indent=2) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        write_atomically(path, text)
