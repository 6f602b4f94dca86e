"""`kernel`: the compiler of all numeric kernels. Compiled code is cached for the user; a first use says so.

A wheel may hold compiled code, too (`compiled/`, see packaging/compile_kernels.py): for any processor of a kind, which
is what commands compile for. Without a folder that can be written to, every process compiles what the wheel lacks.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import pickle
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, cached_property, partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numba
import numpy as np
from numba.core import caching, compiler, event
from numba.core.dispatcher import Dispatcher
from numba.core.serialize import dumps

from trimtab.files import write_atomically

# Compiled code that a wheel comes with, for each version of Python.
SHIPPED = Path(__file__).parent / "compiled" / f"{sys.implementation.cache_tag}.zip"
# Code that was not used for so long is removed from the cache.
KEPT_S, DAY_S = 60 * 86400.0, 86400.0


def kernel(function: Any, *, inline: str = "never") -> Any:
    """Decorator: compile at first use, without the GIL, cached on disk."""
    compiled = numba.njit(nogil=True, inline=inline)(function)
    # The function itself, with NUMBA_DISABLE_JIT.
    if isinstance(compiled, Dispatcher):
        compiled._cache = _KernelCache(function)  # type: ignore[attr-defined]
    return compiled


inlined_kernel = partial(kernel, inline="always")
"""Decorator: a kernel that becomes a part of those that call it, which count no reference for its arrays then."""


@cache
def cache_folder() -> Path | None:
    """Where compiled code is kept, which is made if it is missing; None if it can't be written to."""
    user = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(user) / "trimtab-kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


@cache
def _shipped() -> zipfile.ZipFile | None:
    return zipfile.ZipFile(SHIPPED) if SHIPPED.exists() else None


class _KernelCache(caching._Cache):  # type: ignore[misc]
    """Compiled code of a kernel, in files named after all that it depends on.

    That is the source of the kernel, of the kernels that it calls, of the modules and classes that these use, values of
    globals, types of arguments, and versions.
    """

    def __init__(self, function: Any) -> None:
        self.function = function

    @property
    def cache_path(self) -> str:
        return str(cache_folder() or "")

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled code for a signature, or None."""
        target_context.refresh()
        name = self._name(sig, target_context.codegen())
        folder, shipped = cache_folder(), _shipped()
        found = None
        if folder and (file := folder / name).exists():
            found = file.read_bytes()
            if time.time() - file.stat().st_mtime > DAY_S:
                file.touch()
        elif shipped and name in shipped.NameToInfo:
            found = shipped.read(name)
        return compiler.CompileResult._rebuild(target_context, *pickle.loads(found)) if found else None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the compiled code for a signature."""
        if (folder := cache_folder()) is None or data.lifted or data.library.has_dynamic_globals:
            return
        # Without room, or where another process removes old files, it is compiled again some day.
        with suppress(OSError):
            write_atomically(folder / self._name(sig, data.codegen), dumps(data._reduce()))
            for file in folder.iterdir():
                if time.time() - file.stat().st_mtime > KEPT_S:
                    file.unlink()

    def enable(self) -> None:
        """Nothing: it is always enabled."""

    def disable(self) -> None:
        """Nothing: it is always enabled."""

    def flush(self) -> None:
        """Nothing."""

    def _name(self, sig: Any, codegen: Any) -> str:
        classes = _classes_of(sig)
        parts = [numba.__version__, sys.implementation.cache_tag, codegen.magic_tuple(), str(sig)]
        parts += [self._stamp, *sorted(_hash_of_module(each.__module__) for each in classes)]
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
        return f"{self.function.__module__}.{self.function.__qualname__}-{digest}".replace("<", "").replace(">", "")

    @cached_property
    def _stamp(self) -> tuple[str, ...]:
        """Found when it is used, since a kernel may be defined behind those that call it."""
        own = self.function.__module__
        stamp, functions = [_hash_of_module(own)], [self.function]
        for function in functions:
            for value in _globals_in(function.__code__, function.__globals__):
                module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
                called = getattr(value, "_cache", None)
                if isinstance(called, _KernelCache) and called.function not in functions:
                    functions.append(called.function)
                if isinstance(value, bool | int | float | str | tuple | np.number):
                    stamp.append(repr(value))
                elif isinstance(value, np.ndarray):
                    stamp.append(f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}")
                elif isinstance(module, str) and _is_near(module, own):
                    stamp.append(_hash_of_module(module))
        return tuple(stamp)


def _is_near(module: str, own: str) -> bool:
    """Whether a module is of the same package, or lies beside; others count as fixed."""
    if module.partition(".")[0] == own.partition(".")[0]:
        return True
    one, other = (getattr(sys.modules.get(name), "__file__", None) for name in (module, own))
    return bool(one and other and Path(one).parent == Path(other).parent)


@cache
def _hash_of_module(name: str) -> str:
    """Of its source; the name, if there is no file."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and Path(file).exists() else name


def _classes_of(sig: Any) -> list[type]:
    """Named tuples among the types of arguments, and inside them."""
    found, types = [], list(sig)
    for each in types:
        types += getattr(each, "types", ())
        if hasattr(each, "instance_class"):
            found.append(each.instance_class)
    return found


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
    """

    started = False
    program = ""

    def on_start(self, event: event.Event) -> None:
        if self.started:
            return
        self.started = True
        is_cached = cache_folder() is not None
        often = "once per installation" if is_cached else "at every start unless NUMBA_CACHE_DIR can be written to"
        logging.getLogger("trimtab").info("compiling kernels, %s (up to 40 s)", often)
        if self.program and is_cached:
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
