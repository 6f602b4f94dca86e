"""Files that are there whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file to write, which takes its name at the end, and goes if anything fails. Folders above it are made."""
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
        # A full disk does not say whose bytes there was no room for.
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file, text as UTF-8, so that nobody ever sees a part of it. Folders above it are made."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, atomically."""
    write_whole(path, json.dumps(content, indent=2) + "\n")
