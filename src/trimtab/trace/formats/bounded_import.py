"""Imports of untrusted files, in a child process whose memory and time are limited.

A few bytes can ask for terabytes of memory or endless work, from our readers as well as from a library's. The limits
of the operating system hold for all of them, so the readers themselves need none. macOS limits time alone; there this
process ends a child that takes too much memory.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from trimtab.errors import InputError
from trimtab.messages import note_once, show_messages
from trimtab.trace.formats.importing import common_format, import_files, trace_of
from trimtab.trace.formats.megatron import ids_at_end
from trimtab.trace.formats.normalise import Summary
from trimtab.trace.formats.records import ImportOptions, Record
from trimtab.trace.message_text import reason
from trimtab.trace.routing import RoutingTrace

log = logging.getLogger("trimtab")
SMALL_FILE = 8 << 20
# A list of numbers takes in Python up to 16 times its JSON, and a mapped file counts as memory.
_MEMORY_PER_BYTE = 16
# Of a child before it reads, where its resident memory is watched: Python, Arrow and compiled kernels.
_START_BYTES = 512 << 20
_WATCH_S = 0.05
_ADVICE = "the limit for a file of this size; if it is not damaged, save it in smaller parts or uncompressed"


@dataclass(frozen=True)
class Limits:
    """What the import of one file may take.

    Attributes:
        memory: bytes of address space, beyond what the process has before it reads the file.
        seconds: of processor time. Elapsed time depends on what else a machine does.
    """

    memory: int = 768 << 20
    seconds: int = 10

    def of_size(self, size: int) -> Limits:
        """These limits for a file of a number of bytes: larger above 8 MB, in proportion."""
        return Limits(
            self.memory + _MEMORY_PER_BYTE * max(0, size - SMALL_FILE),
            math.ceil(self.seconds * max(1.0, size / SMALL_FILE)),
        )


def bounded_import(
    files: Sequence[Path], form: str | None, options: ImportOptions, summary: Summary, limits: Limits | None = None
) -> Generator[RoutingTrace, None, None]:
    """Yields the files of one dump, in order, as parts of a trace; as `import_files`, but in a child process.

    With the default limits the child takes at most 1 GiB and 10 s for a file below 8 MB.

    Args:
        form: a key of `FORMATS`; None to detect it.
        summary: its counts are increased, and its format is set.
        limits: for a file below 8 MB.

    Raises:
        InputError: one line that names the file, if it is not of this format, is damaged, or takes more than `limits`;
            on systems that neither limit a process's memory nor tell it.
    """
    limits, limited = limits or Limits(), memory_is_limited()
    # Without -P the child would import modules from the user's folder.
    command = [sys.executable, "-P", "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        file = files[0]
        watch = None if limited else MemoryWatch(child, limits, file)
        try:
            with suppress(BrokenPipeError), child.stdin as request:
                pickle.dump((log.getEffectiveLevel(), (files, form, options, summary, limits, limited)), request)
            while True:
                try:
                    answer = pickle.load(child.stdout)
                except (EOFError, pickle.UnpicklingError):
                    status = child.wait()
                    if watch and watch.exceeded:
                        raise _too_much_memory(file, limits) from None
                    raise _ended(status, file, limits) from None
                match answer:
                    case Path():
                        file = answer
                        if watch:
                            watch.begin(file)
                    case InputError():
                        raise answer
                    case str():
                        note_once(answer)
                    case Summary():
                        vars(summary).update(vars(answer))
                        return
                    case part, Summary() as counted:
                        vars(summary).update(vars(counted))
                        yield part
        finally:
            child.kill()


def _ended(status: int, file: Path, limits: Limits) -> Exception:
    """The error of a child that ended without an answer."""
    allowed = limits.of_size(file.stat().st_size)
    if status == -signal.SIGXCPU:
        return InputError(f"{file}: takes more than {allowed.seconds} s of processor time, {_ADVICE}")
    if status < 0:
        return InputError(f"{file}: its reader was ended by {signal.Signals(-status).name}, as for lack of memory")
    return RuntimeError(f"{file}: its reader failed with status {status}")


def _too_much_memory(file: Path, limits: Limits) -> InputError:
    allowed = limits.of_size(file.stat().st_size)
    return InputError(f"{file}: takes more than {allowed.memory >> 20} MiB of memory, {_ADVICE}")


class MemoryWatch(Thread):
    """Kills a child process that takes more memory than it may for a file, for systems without such a limit.

    Attributes:
        exceeded: whether it did.

    Raises:
        InputError: if the system does not tell the memory of processes.
    """

    def __init__(self, child: subprocess.Popen[bytes], limits: Limits, file: Path) -> None:
        super().__init__(daemon=True)
        self.exceeded = False
        self._child, self._limits = child, limits
        self.begin(file)
        try:
            _resident_bytes(child.pid)
        except FileNotFoundError:
            child.kill()
            raise InputError("dumps are imported where memory is limited or told; this system has no ps") from None
        self.start()

    def begin(self, file: Path) -> None:
        """The child reads this file from now on."""
        self._allowed = _START_BYTES + self._limits.of_size(file.stat().st_size if file.exists() else 0).memory

    def run(self) -> None:
        """Ends with the child."""
        while self._child.poll() is None:
            if _resident_bytes(self._child.pid) > self._allowed:
                self.exceeded = True
                self._child.kill()
            time.sleep(_WATCH_S)


def _resident_bytes(pid: int) -> int:
    """Memory of a process; 0 if it has ended."""
    told = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True).stdout
    return int(told or 0) << 10


class ProcessLimits:
    """Sets the limits of this process for one file after another. What it has used before does not count.

    Args:
        limits: of a file.
        memory: False if another process watches its memory.
    """

    def __init__(self, limits: Limits, *, memory: bool = True) -> None:
        self._limits = limits
        self._address_space = _address_space() if memory else None
        # A process that exceeds a limit would leave a core file.
        _set_limit(resource.RLIMIT_CORE, 0)

    def apply(self, file: Path) -> None:
        """Limit the rest of this process's work to what this file may take."""
        limits = self._limits.of_size(file.stat().st_size)
        used = resource.getrusage(resource.RUSAGE_SELF)
        if self._address_space is not None:
            _set_limit(resource.RLIMIT_AS, self._address_space + limits.memory)
        _set_limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + limits.seconds)


def _set_limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


_STATM = Path("/proc/self/statm")


def memory_is_limited() -> bool:
    """Whether this system limits the memory of a process, beyond what it already has."""
    return _STATM.exists()


def _address_space() -> int:
    """Bytes that this process has mapped."""
    return int(_STATM.read_text().split()[0]) * resource.getpagesize()


def compile_kernels() -> None:
    """Compile or load what every import uses, before limits are set."""
    import pyarrow  # noqa: F401

    record = Record(np.array([[[0, 1]], [[1, 2]]], np.int32), "")
    for num_experts in (4, 400):
        trace_of([record], ImportOptions(num_experts=num_experts))
    ids_at_end(b"[[0, 1]]}\n")


def _answer(request: Any, send: Callable[[Any], None]) -> None:
    """The child's work: sends notes, the file that is read, `(part, summary)`s, and last a summary or an error."""
    files, form, options, summary, limits, limited = request
    compile_kernels()
    process = ProcessLimits(limits, memory=limited)
    file, is_full = files[0], False

    def begin(path: Path) -> None:
        nonlocal file
        if path != file:
            send(path)
        file = path
        if path.exists() and not path.is_file():
            # Reading a pipe or a device may never end.
            raise InputError(f"{path}: is not a regular file")
        process.apply(path)

    try:
        begin(file)
        summary.format, files = (form, files) if form else common_format(files, options.optional, begin, send)
        for part in import_files(files, summary.format, options, summary, begin):
            send((part, summary))
        send(summary)
    except InputError as error:
        send(error)
    except OSError as error:
        send(InputError(f"{file}: can't be read ({reason(error)})"))
    except MemoryError:
        # What was read is let go at the end of this block.
        is_full = True
    if is_full:
        send(_too_much_memory(file, limits))


def _main() -> None:
    # The parent ends this process when it is interrupted.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    # What a library prints is no answer.
    os.dup2(2, 1)

    def send(answer: Any) -> None:
        pickle.dump(answer, answers, protocol=5)
        answers.flush()

    level, request = pickle.load(sys.stdin.buffer)
    show_messages(level)
    with suppress(BrokenPipeError):
        _answer(request, send)
        answers.close()


if __name__ == "__main__":
    _main()
