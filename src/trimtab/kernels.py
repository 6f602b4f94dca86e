"""`kernel`: the compiler of all numeric kernels. Compiled code is cached beside the source; a first use says so.

Where the source's folder can't be written to, numba caches in the user's cache folder. Without either, every process
compiles.
"""

from __future__ import annotations

import atexit
import logging
import subprocess
import sys
from typing import Any

import numba
from numba.core import event


def kernel(function: Any) -> Any:
    """Decorator: compile at first use, without the GIL, cached on disk."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        # No folder can be written to.
        _first_compile.is_cached = False
        return numba.njit(nogil=True)(function)


class _FirstCompile(event.Listener):
    """Acts when a process compiles its first kernel; does nothing if all are cached.

    Attributes:
        program: Python code that runs in a second process then.
        is_cached: whether compiled code is cached on disk.
    """

    started = False
    program = ""
    is_cached = True

    def on_start(self, event: event.Event) -> None:
        if self.started:
            return
        self.started = True
        often = "once per installation" if self.is_cached else "at every start unless NUMBA_CACHE_DIR can be written to"
        logging.getLogger("trimtab").info("compiling kernels, %s (up to 40 s)", often)
        if self.program and self.is_cached:
            beside = subprocess.Popen([sys.executable, "-c", self.program], stderr=subprocess.DEVNULL)
            atexit.register(beside.kill)

    def on_end(self, event: event.Event) -> None:
        """Nothing."""


_first_compile = _FirstCompile()
event.register("numba:compile", _first_compile)


def compile_beside(program: str) -> None:
    """Run Python code in a second process if this process has to compile, so that two cores compile kernels.

    Args:
        program: code that uses kernels which this process will need later, and prints nothing.
    """
    _first_compile.program = program


@kernel
def copy_values(source_N, target_N):  # type: ignore[no-untyped-def]
    """Copy an array to the beginning of another. An assignment of slices takes numba two seconds to compile."""
    for n in range(len(source_N)):
        target_N[n] = source_N[n]
