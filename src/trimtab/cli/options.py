"""Shared by commands: option types, JSON output, and an error when an extra is not installed."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, ProgressColumn

from trimtab.errors import InputError


def positive(text: str) -> int:
    """An integer of at least 1."""
    return _integer(text, 1)


def whole(text: str) -> int:
    """An integer of at least 0."""
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number of at least {least}")
    return value


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Add the trace argument: `options.trace`, a list of paths."""
    parser.add_argument(
        "trace",
        type=Path,
        nargs="+",
        metavar="TRACE",
        help="routing trace (.parquet); several files, folders or patterns are one trace",
    )


def need_extra(*modules: str, extra: str = "train") -> None:
    """Raise InputError unless the modules of an extra are installed."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise InputError(f"this command needs {', '.join(missing)}; install it with: pip install 'trimtab[{extra}]'")


def progress_bar(*columns: ProgressColumn) -> Progress:
    """Progress bar on stderr, hidden when not a terminal; stdout has only the result."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def check_outputs(*paths: Path | None, sources: Sequence[Path] = ()) -> None:
    """Raise InputError, before computing anything, if an output can't be written or is also an input."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise InputError(f"{path}: a folder; name the file to write")
        if path.exists() and any(source.samefile(path) for source in sources):
            raise InputError(f"{path}: to be read and written; give another --output")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise InputError(f"{path}: {folder} is not a folder that can be written to")
