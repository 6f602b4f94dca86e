"""`kernel`: the compiler of all numeric kernels. Compiled code is cached beside the source; a first use says so."""

from __future__ import annotations

import logging

import numba
from numba.core import event

kernel = numba.njit(cache=True, nogil=True)
"""Decorator: compile at first use, without the GIL, cached on disk."""


class _FirstCompile(event.Listener):
    """Logs one line when a process compiles its first kernel; nothing if all are cached."""

    def on_start(self, event: event.Event) -> None:
        if not self._logged:
            self._logged = True
            logging.getLogger("trimtab").info("compiling kernels, once per installation (up to 20 s)")

    def on_end(self, event: event.Event) -> None:
        """Nothing."""

    _logged = False


event.register("numba:compile", _FirstCompile())


@kernel
def copy_values(source_N, target_N):  # type: ignore[no-untyped-def]
    """Copy an array to the beginning of another. An assignment of slices takes numba two seconds to compile."""
    for n in range(len(source_N)):
        target_N[n] = source_N[n]
