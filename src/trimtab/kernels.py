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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numba
import numpy as np
from numba.core import caching, compiler, config, event
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
        compiled._cache = _KernelCache(function, compiled.targetoptions)  # type: ignore[attr-defined]
    return compiled


inlined_kernel = partial(kernel, inline="always")
"""Decorator: a kernel that becomes a part of those that call it, which count no reference for its arrays then."""


@cache
def cache_folder() -> Path | None:
    """Where compiled code is kept, which is made if it is missing; None if it can't be written to."""
    try:
        user = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(user) / "trimtab-kernels"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        # Nobody's home is known, or it can't be written to.
        return None
    return folder if os.access(folder, os.W_OK) else None


class _KernelCache(caching._Cache):  # type: ignore[misc]
    """Compiled code of a kernel, in files named after all that it depends on.

    That is the code of the kernel and of the kernels that it calls, values that they use, types of arguments, options,
    and versions; as they are in this process, not in the files, which may have changed since.
    """

    def __init__(self, function: Any, options: Any) -> None:
        self.function, self._options = function, repr(sorted(options.items()))

    @property
    def cache_path(self) -> str:
        return str(cache_folder() or "")

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled code for a signature, or None."""
        target_context.refresh()
        name = self._name(sig, target_context.codegen())
        try:
            found = _read(name)
            return compiler.CompileResult._rebuild(target_context, *pickle.loads(found)) if found else None
        except Exception:  # Damaged: it is compiled and written anew.
            return None

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
        flags = config.BOUNDSCHECK, config.OPT, config.DEBUGINFO_DEFAULT
        parts = [numba.__version__, sys.implementation.cache_tag, codegen.magic_tuple(), flags, self._options]
        parts += [str(sig), *map(_text_of, _classes_of(sig)), *_texts_of_kernel(self.function)]
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
        return f"{self.function.__module__}.{self.function.__qualname__}-{digest}".replace("<", "").replace(">", "")


@cache
def _shipped() -> frozenset[str]:
    """Names of the code that the wheel has."""
    if not SHIPPED.exists():
        return frozenset()
    with zipfile.ZipFile(SHIPPED) as archive:
        return frozenset(archive.namelist())


def _read(name: str) -> bytes | None:
    """Compiled code from the cache, else from the wheel; None if neither has it."""
    with suppress(OSError):
        if folder := cache_folder():
            file = folder / name
            content = file.read_bytes()
            with suppress(OSError):
                if time.time() - file.stat().st_mtime > DAY_S:
                    file.touch()
            return content
    if name not in _shipped():
        return None
    # Opened for each kernel: processes that are forked would share its place in the file.
    with zipfile.ZipFile(SHIPPED) as archive:
        return archive.read(name)


def _texts_of_kernel(function: Any) -> list[str]:
    """All that its machine code depends on as it is in this process: its code and that of the kernels that it calls,
    and values of globals, of attributes of modules and of variables of functions around it."""
    texts, functions = [], [function]
    for each in functions:
        cells = [cell.cell_contents for cell in each.__closure__ or ()]
        texts += [_code_text(each.__code__), _text_of(each.__defaults__), *map(_text_of, cells)]
        for name, value in _names_in(each.__code__, each.__globals__):
            called = getattr(value, "_cache", None)
            if isinstance(called, _KernelCache):
                if called.function not in functions:
                    functions.append(called.function)
                texts.append(f"{name} is kernel {functions.index(called.function)}")
            else:
                texts.append(f"{name} is {_text_of(value)}")
    return texts


def _code_text(code: CodeType) -> str:
    consts = [_code_text(each) if isinstance(each, CodeType) else f"{type(each)} {each!r}" for each in code.co_consts]
    return repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags, consts))


def _names_in(code: CodeType, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The globals that a function uses, and what it may use of modules among them, by name; then those of functions
    inside it."""
    for name in sorted(set(code.co_names) & values.keys()):
        yield name, values[name]
        if isinstance(values[name], ModuleType):
            inside = vars(values[name])
            yield from ((f"{name}.{each}", inside[each]) for each in sorted(set(code.co_names) & inside.keys()))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner, values)


def _text_of(value: Any) -> str:
    """What compiled code may have inside of a value: the value itself, the fields of a named tuple, or a name."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | tuple | np.generic):
        return f"{type(value)} {value!r}"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__qualname__
    return f"{getattr(value, '__module__', None)}.{name} {getattr(value, '_fields', '')}"


def _classes_of(sig: Any) -> list[type]:
    """Named tuples among the types of arguments, and inside them."""
    found, types = [], list(sig)
    for each in types:
        types += getattr(each, "types", ())
        if hasattr(each, "instance_class"):
            found.append(each.instance_class)
    return found


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
