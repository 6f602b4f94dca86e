"""`kernel`: the compiler of all numeric kernels. Compiled code is cached beside the source; a first use says so.

Where the source's folder can't be written to, numba caches in the user's cache folder. Without either, every process
compiles.
"""

from __future__ import annotations

import atexit
import logging
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from types import CodeType
from typing import Any

import numba
import numpy as np
from numba.core import event
from numba.core.caching import IndexDataCacheFile


def kernel(function: Any, *, inline: str = "never") -> Any:
    """Decorator: compile at first use, without the GIL, cached on disk."""
    try:
        compiled = numba.njit(cache=True, nogil=True, inline=inline)(function)
    except RuntimeError:
        # No folder can be written to.
        _first_compile.is_cached = False
        return numba.njit(nogil=True, inline=inline)(function)
    if not hasattr(compiled, "_cache"):
        # The function itself, with NUMBA_DISABLE_JIT.
        return compiled
    compiled._cache._cache_file = _StampedFile(compiled._cache._cache_file, function)
    return compiled


inlined_kernel = partial(kernel, inline="always")
"""Decorator: a kernel that becomes a part of those that call it, which count no reference for its arrays then."""


class _StampedFile(IndexDataCacheFile):
    """Where a kernel is cached, with a stamp of all that compiled code has inside.

    That is the code of the kernels that it calls, and values of globals. Numba looks at the time of the function's own
    file only, so that a cached caller would go on with what they were.
    """

    def __init__(self, file: IndexDataCacheFile, function: Any) -> None:
        self.__dict__.update(vars(file))
        self._of_own_file, self._function = file._source_stamp, function

    @property
    def _source_stamp(self) -> tuple[Any, ...]:
        """Found when it is used, since a kernel may be defined behind those that call it."""
        stamp, files = [], [self]
        for file in files:
            stamp.append(file._of_own_file)
            for value in _globals_in(file._function.__code__, file._function.__globals__):
                # Without a file there is no cache that could be old.
                called = getattr(getattr(value, "_cache", None), "_cache_file", None)
                if isinstance(called, _StampedFile) and called not in files:
                    files.append(called)
                # Modules and types count as fixed.
                stamp.append(repr(value) if isinstance(value, (bool, int, float, str, tuple, np.number)) else None)
        return tuple(stamp)


def _globals_in(code: CodeType, values: dict[str, Any]) -> Iterator[Any]:
    """The globals that a function uses, in order of their names; those of functions inside it after its own."""
    for name in sorted(set(code.co_names) & values.keys()):
        yield values[name]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_in(inner, values)


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
