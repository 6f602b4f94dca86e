"""Commands and ranks that a test starts as new Python processes are forked from its own, where all is imported.

They see what a new process sees: arguments, working directory, standard streams, and no other open files. Commands with
an environment or interpreter options of their own are started as usual.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import resource_tracker, spawn, util
from typing import Any

# Their parts that are used here have no public names.
SUBPROCESS: Any = subprocess
UTIL: Any = util
# Modules that are run with `python -m`.
COMMANDS = ("trimtab.cli.main", "recipes.rl.train", "recipes.disaggregated_rollout.train")
# How multiprocessing starts a process.
SPAWNED = re.compile(r"spawn_main\(tracker_fd=(?P<tracker>\d+), pipe_handle=(?P<pipe>\d+)\)")


def fork_commands_from_here() -> None:
    """Start commands and processes of multiprocessing as forks, from now on in this process and its forks."""
    start, start_spawned = SUBPROCESS._fork_exec, UTIL.spawnv_passfds

    def fork_command(arguments: Sequence[Any], *rest: Any) -> int:
        words = [os.fsdecode(word) for word in arguments]
        directory, environment = rest[3:5]
        if words[:2] != [sys.executable, "-m"] or words[2] not in COMMANDS or environment is not None:
            return int(start(arguments, *rest))
        given, _, _, output, _, errors = rest[5:11]
        starts_session = rest[14]

        def run() -> int:
            for stream, descriptor in enumerate((given, output, errors)):
                if descriptor >= 0:
                    os.dup2(descriptor, stream)
            if directory is not None:
                os.chdir(directory)
            if starts_session:
                os.setsid()
            forget_open_files({0, 1, 2})
            sys.argv = words[2:]
            return int(import_module(words[2]).main())

        return _fork(run)

    def fork_spawned(path: Any, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        found = SPAWNED.search(" ".join(map(str, arguments)))
        if found is None:
            return int(start_spawned(path, arguments, descriptors))

        def run() -> int:
            forget_open_files({0, 1, 2, *descriptors})
            tracker: Any = resource_tracker
            tracker._resource_tracker._fd = int(found["tracker"])
            pipe, serve = int(found["pipe"]), spawn._main  # type: ignore[attr-defined]
            return int(serve(pipe, os.dup(pipe)))

        return _fork(run)

    SUBPROCESS._fork_exec = fork_command
    UTIL.spawnv_passfds = fork_spawned


def forget_open_files(kept: Collection[int]) -> None:
    """Let all other descriptors of this forked process be the null device, so that others see their files closed.

    They are not closed themselves: objects that own them may still use them, or close them later.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept and descriptor != null:
            with suppress(OSError):
                os.dup2(null, descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _fork(run: Callable[[], int]) -> int:
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        atexit._clear()
        UTIL._finalizer_registry.clear()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            status = run()
        except SystemExit as ending:
            status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        except BaseException:
            traceback.print_exc()
        UTIL._exit_function()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(status)
