"""`kernel`: the compiler of all numeric kernels. Compiled code is cached beside the source; a first use says so."""

from __future__ import annotations

import atexit
import logging
import subprocess
import sys

import numba
from numba.core import event

kernel = numba.njit(cache=True, nogil=True)
"""Decorator: compile at first use, without the GIL, cached on disk."""


class _FirstCompile(event.Listener):
    """Acts when a process compiles its first kernel; does nothing if all are cached.

    Attributes:
        program: Python code that runs in a second process then.
    """

    started = False
    program = ""

    def on_start(self, event: event.Event) -> None:
        if self.started:
            return
        self.started = True
        logging.getLogger("trimtab").info("compiling kernels, once per installation (up to 40 s)")
        if self.program:
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
