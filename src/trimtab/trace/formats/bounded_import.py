"""Imports of untrusted files, in a child process whose memory and time are limited.

A few bytes can ask for terabytes of memory or endless work, from our readers as well as from a library's. The limits
of the operating system hold for all of them, so the readers themselves need none. Linux has both limits, macOS that of
time alone, and Windows none.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.errors import InputError
from trimtab.messages import show_messages
from trimtab.trace.formats.importing import common_format, import_files, trace_of
from trimtab.trace.formats.megatron import ids_at_end
from trimtab.trace.formats.normalise import Summary
from trimtab.trace.formats.records import ImportOptions, Record
from trimtab.trace.message_text import reason
from trimtab.trace.routing import RoutingTrace

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

log = logging.getLogger("trimtab")
SMALL_FILE = 8 << 20
# A list of numbers takes in Python up to 16 times its JSON, and a mapped file counts as memory.
_MEMORY_PER_BYTE = 16
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
            on systems without limits of processes.
    """
    if resource is None:
        raise InputError("dumps are imported on Linux and macOS; this system can't limit what an untrusted file takes")
    limits = limits or Limits()
    # Without -P the child would import modules from the user's folder.
    command = [sys.executable, "-P", "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with suppress(BrokenPipeError), child.stdin as request:
                pickle.dump((log.getEffectiveLevel(), (files, form, options, summary, limits)), request)
            file = files[0]
            while True:
                try:
                    answer = pickle.load(child.stdout)
                except (EOFError, pickle.UnpicklingError):
                    raise _ended(child.wait(), file, limits) from None
                match answer:
                    case Path():
                        file = answer
                    case InputError():
                        raise answer
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


class ProcessLimits:
    """Sets the limits of this process for one file after another. What it has used before does not count."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._address_space = _address_space()
        if self._address_space is None:
            log.warning("this system does not limit the memory of an import; only import files that you trust")
        # A process that exceeds a limit would leave a core file.
        _set_limit(resource.RLIMIT_CORE, 0)

    def apply(self, file: Path) -> Limits:
        """Limit the rest of this process's work to what this file may take."""
        limits = self._limits.of_size(file.stat().st_size)
        used = resource.getrusage(resource.RUSAGE_SELF)
        if self._address_space is not None:
            _set_limit(resource.RLIMIT_AS, self._address_space + limits.memory)
        _set_limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + limits.seconds)
        return limits


def _set_limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _address_space() -> int | None:
    """Bytes that this process has mapped; None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def compile_kernels() -> None:
    """Compile or load what every import uses, before limits are set."""
    record = Record(np.array([[[0, 1]], [[1, 2]]], np.int32), "")
    for num_experts in (4, 400):
        trace_of([record], ImportOptions(num_experts=num_experts))
    ids_at_end(b"[[0, 1]]}\n")


def _answer(request: Any, send: Callable[[Any], None]) -> None:
    """The child's work: answers are the file that is being read, `(part, summary)`s, and last a summary or an error."""
    files, form, options, summary, limits = request
    compile_kernels()
    process = ProcessLimits(limits)
    file, allowed, is_full = files[0], limits, False

    def begin(path: Path) -> None:
        nonlocal allowed, file
        if path != file:
            send(path)
        file = path
        if path.exists() and not path.is_file():
            # Reading a pipe or a device may never end.
            raise InputError(f"{path}: is not a regular file")
        allowed = process.apply(path)

    try:
        begin(file)
        summary.format = form or common_format(files, begin)
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
        send(InputError(f"{file}: takes more than {allowed.memory >> 20} MiB of memory, {_ADVICE}"))


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
