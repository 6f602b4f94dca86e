"""HiGHS, the solver of linear programs. Its package is optional, and prints to standard output."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trimtab.errors import InputError, install


def why_no_solver() -> str:
    """Why highspy can't be imported, with the remedy; "" if it can."""
    try:
        import highspy  # noqa: F401
    except (ImportError, OSError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "highspy"
        reason = "is not installed" if missing else f"can't be imported ({str(error).splitlines()[0]})"
        return f"highspy {reason}; {install('solver')}"
    return ""


def highs(purpose: str) -> Any:
    """The package highspy. Raises InputError that begins with the purpose if it can't be imported."""
    if why_no_solver():
        raise InputError(f"{purpose}: {why_no_solver()}")
    import highspy

    return highspy


def new_solver(purpose: str) -> Any:
    """A `highspy.Highs` of one thread that prints nothing."""
    package = highs(purpose)
    # From 1.16 on, a new solver prints its version before it can be told not to.
    with _no_standard_output():
        solver = package.Highs()
        solver.silent()
    solver.setOptionValue("threads", 1)
    return solver


@contextmanager
def _no_standard_output() -> Iterator[None]:
    """Discards what C code of this process prints."""
    try:
        kept = os.dup(1)
    except OSError:  # closed
        yield
        return
    flush = ctypes.CDLL(None).fflush
    flush(None)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
