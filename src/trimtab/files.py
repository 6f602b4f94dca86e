"""Atomic writes of files: another process sees the old file or the complete new one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


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
    """Write a JSON file atomically."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")
