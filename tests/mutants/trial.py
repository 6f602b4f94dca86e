"""`Trial`: tests run on a copy of the repository with one mistake or none, in a process forked from this one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.forked_files import fork_ranks_from_here
from helpers.processor_time import ProcessorLimit, seconds_of, session_of
from mutants.mutations import Mutation

# Exit statuses of the process; others are those of a crash.
SURVIVED, KILLED, SET_UP, NOT_FOUND = 0, 11, 12, 13
# Processor seconds to import Trimtab and the test files, to compile kernels, or to run them as Python; times that tests
# may take longer than without a mistake.
IMPORTS_S, COMPILING_S, AS_PYTHON_S, TIMES = 20.0, 150.0, 50.0, 4.0


class Trial:
    """Tests of one mistake, in a process of their own.

    Args:
        copy: folder of a copy of the repository, which is changed until `close`.
        expected_s: processor seconds that the tests take without the mistake.
        compiled: whether mistakes in kernels are compiled; else they run as Python.
        mistaken: whether the mistake is made; otherwise all else is as with it.

    Attributes:
        limit_s: processor seconds that it may use.
        used_s: processor seconds so far.
    """

    def __init__(
        self,
        copy: Path,
        mutation: Mutation,
        tests: Sequence[str],
        expected_s: float,
        *,
        compiled: bool = False,
        mistaken: bool = True,
    ) -> None:
        self.mistaken = mistaken
        self._mutation, self._tests, self._is_compiled = mutation, tests, compiled
        self.used_s = 0.0
        self._copy = copy
        self._path = copy / mutation.file
        self._source = self._path.read_bytes()
        self._path.write_bytes(mutation.apply(self._source) if mistaken else self._source)
        self._process = os.fork()
        if not self._process:
            self._run()
        kernels_s = (COMPILING_S if compiled else AS_PYTHON_S) if mutation.is_kernel else 0.0
        self.limit_s = IMPORTS_S + TIMES * expected_s + kernels_s
        self._limit = ProcessorLimit([], self.limit_s)

    def result(self) -> str | None:
        """The result if there is one: "killed", "survived", or why it is not known."""
        ended, status, usage = os.wait4(self._process, os.WNOHANG)
        if not ended:
            processes = session_of(self._process)
            self.used_s = max(self.used_s, seconds_of(processes))
            exceeded = self._limit.exceeded(processes)
            if not exceeded:
                return None
            self._end()
            os.waitpid(self._process, 0)
            return exceeded
        self._end()
        self.used_s = max(self.used_s, usage.ru_utime + usage.ru_stime)
        code = os.waitstatus_to_exitcode(status)
        names = {SURVIVED: "survived", KILLED: "killed", SET_UP: "failed at set-up", NOT_FOUND: "tests not found"}
        return names.get(code, f"ended with status {code}")

    def failed_test(self) -> str:
        """The test that failed, and why, as pytest says in one line; "" if none did."""
        lines = self._copy.with_suffix(".log").read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.startswith(("FAILED", "ERROR"))), "")

    def close(self) -> None:
        """Take the mistake back."""
        self._path.write_bytes(self._source)

    def _end(self) -> None:
        for process in session_of(self._process):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _run(self) -> None:
        status = 1
        try:
            os.setsid()
            log = os.open(self._copy.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for descriptor in (1, 2):
                os.dup2(log, descriptor)
            # Not where a test of this one captures them.
            sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2))
            os.chdir(self._copy)
            sys.path[:0] = [str(self._copy / "src"), str(self._copy / "tests"), str(self._copy)]
            # Those of the copy are imported instead.
            for name in [name for name in sys.modules if name.partition(".")[0] in ("helpers", "mutants", "tests")]:
                del sys.modules[name]
            os.environ |= {"PYTHONPATH": str(self._copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
            sys.dont_write_bytecode = True
            if self._mutation.is_kernel and not self._is_compiled:
                os.environ["NUMBA_DISABLE_JIT"] = "1"
                import numba

                numba.config.reload_config()
            verdict = _Verdict()
            options = ["-x", "-q", "-p", "no:cacheprovider", *self._tests]
            if self._is_compiled:
                # While kernels are compiled, ranks and commands are too late for some tests.
                options += ["-m", "not slow"]
            ended = pytest.main(options, plugins=[verdict])
            status = verdict.status if ended else SURVIVED
            sys.stdout.flush()
        finally:
            os._exit(status)


class _Verdict:
    """A pytest plugin: what the first failure was."""

    def __init__(self) -> None:
        self.status = NOT_FOUND

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.status = SET_UP

    def pytest_collection_finish(self) -> None:
        # Ranks are forked from here, with all that tests import.
        fork_ranks_from_here()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.status = SET_UP if report.when == "setup" else KILLED
