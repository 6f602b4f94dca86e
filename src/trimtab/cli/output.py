"""What commands write: checks before anything is computed, and figures with their tables."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from trimtab.console import console
from trimtab.errors import InputError
from trimtab.files import STDOUT, is_stream, write_json

log = logging.getLogger("trimtab")
SAID_EVERY_S = 10.0
FILES = ("output", "json", "html", "perfetto", "frontier", "picture", "page", "figures")
# Those that are folders.
FOLDERS = ("figures",)
# Options that name files to read, with the pattern of files in a folder.
SOURCES = {"trace": "*.parquet", "compare": "*.parquet", "source": "*", "settings": "*"}
# Code that uses the kernels of balancers.
PLANNING = """
from trimtab import Run, plan
from trimtab.trace import synthesize

trace = synthesize(num_sequences=64, sequence_length=32, num_layers=2, num_experts=16, top_k=2, zipf=1.5)
for policy in {names}:
    plan(trace, Run(ranks=8, ranks_per_node=4, token_budget=128), policy=policy)
"""


def compile_planners(names: Sequence[str]) -> None:
    """Compile the kernels of balancers in a second process, if this one has to compile."""
    from trimtab.kernels import compile_beside

    compile_beside(PLANNING.format(names=list(names)))


@contextmanager
def progress_shown() -> Iterator[Callable[..., None]]:
    """A progress bar; where stderr is no terminal, a line every `SAID_EVERY_S` seconds.

    Yields a function that is told what is being done and, if that is known, how many of how many are done.
    """
    doing, ended = ["reading"], threading.Event()

    def say() -> None:
        while not ended.wait(SAID_EVERY_S):
            log.info("%s", doing[0])

    if not sys.stderr.isatty():
        threading.Thread(target=say, daemon=True).start()
    try:
        with Progress(transient=True) as progress:
            task = progress.add_task(doing[0], total=None)

            def update(text: str, done: int = 0, total: int | None = None) -> None:
                doing[0] = f"{text}, {done:,} of {total:,} done" if total else text
                progress.update(task, description=text, completed=done, total=total)

            yield update
    finally:
        ended.set()


def check_outputs(options: argparse.Namespace) -> None:
    """Raise InputError if a file to write can't be written, is also read, or is written twice."""
    given = {name: getattr(options, name, None) for name in FILES}
    paths = [path for name, path in given.items() if path and (name, path) != ("json", STDOUT)]
    for name in FOLDERS:
        if (folder := given[name]) and folder.exists() and not folder.is_dir():
            raise InputError(f"{folder}: not a folder")
    sources: list[Path] = []
    for name in SOURCES if paths else ():
        from trimtab.trace.store import named_files

        if source := getattr(options, name, None):
            sources += named_files(source, SOURCES[name])
    for place, path in enumerate(paths):
        if path == STDOUT:
            raise InputError(f"{path}: not a file; only --json - writes to standard output")
        if is_stream(path):
            if not os.access(path, os.W_OK):
                raise InputError(f"{path}: can't be written to")
            continue
        if path.parent == Path("/dev"):
            raise InputError(f"{path}: no such device")
        if os.path.realpath(path) in map(os.path.realpath, paths[:place]):
            raise InputError(f"{path}: to be written twice; name another file")
        if path.exists() and any(source.samefile(path) for source in sources):
            raise InputError(f"{path}: to be read and written; name another file")
        folder = next(parent for parent in Path(os.path.realpath(path)).parents if parent.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise InputError(f"{path}: {folder} is not a folder that can be written to")


def write_figures(options: argparse.Namespace, figures: dict[str, Any]) -> Console:
    """Write the figures to `--json`, if given. Returns the console for tables, silent if they went to stdout."""
    if options.json is not None:
        write_json(options.json, figures)
    return console(quiet=options.json == STDOUT)
