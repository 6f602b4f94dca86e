"""`pytest --forks N`: test files in processes forked from one that has imported everything and collected all tests.

A file runs in a process of its own, at most N at a time, so that files share neither threads nor memory. Ranks of the
tests are forked from a process that is forked before the file's first test. Nothing is imported twice.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import multiprocessing
import os
import re
import resource
import signal
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from helpers.forked_commands import forget_open_files, fork_commands_from_here
from helpers.processor_time import ProcessorLimit, descendants_of

# Seconds of each file in the last run: the longest start first.
SECONDS = "forked_files/seconds"
# Files that start ranks or a browser take longest.
STARTS = re.compile(r"\b(on_ranks|runs_on_ranks|pool|launch|browser|train_command)\b")
# Of a file: processor seconds, and seconds for which all its processes may wait, longer than ranks may (`rank_pool`).
LIMIT_S, IDLE_S = 3600.0, float(os.environ.get("TRIMTAB_TESTS_IDLE_S", 120))
POLL_S = 1.0
# Imported once for all ranks, if a test needs one of them.
OF_RANKS = {
    # The first optimizer of a process imports `torch._dynamo`, for three seconds.
    "torch": ("recipes.rl.train", "transformers", "torch._dynamo"),
    "megatron": ("megatron.core.models.gpt.gpt_model", "megatron.core.optimizer"),
    "trl": ("trl.trainer.grpo_trainer",),
    "test_verl": ("verl.workers.engine.megatron.transformer_impl", "mbridge"),
}


def _import_for_ranks(files: Iterable[Path]) -> None:
    names = " ".join(str(file) for file in files if STARTS.search(file.read_text()))
    for word, modules in OF_RANKS.items():
        if word in names or (word == "torch" and names):
            for module in filter(_is_installed, modules):
                with warnings.catch_warnings(action="ignore"):
                    importlib.import_module(module)


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


@dataclass
class _Child:
    """A process that runs the tests of one file.

    Attributes:
        items: tests that have not ended.
        reports: from the process: a test's name as it starts, its reports, and None as it ends.
        limit: of waiting.
        problem: why the process was ended here; "" if it was not.
    """

    items: deque[pytest.Item]
    process: ForkProcess
    reports: Connection
    limit: ProcessorLimit = field(default_factory=lambda: ProcessorLimit([], LIMIT_S, IDLE_S))
    problem: str = ""

    @property
    def file(self) -> Path:
        return self.items[0].path

    def end_if_stuck(self) -> None:
        """End the process and those that it started if they wait, or compute, for too long."""
        processes = descendants_of(self.process.ident or 0)
        self.problem = self.problem or self.limit.exceeded(processes)
        if self.problem:
            # Python writes where each thread waits.
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGABRT)


class ForkedFiles:
    """The plugin: runs the collected tests in forked processes, and reports them here."""

    def __init__(self, config: pytest.Config, forks: int) -> None:
        self._config = config
        self._forks = forks
        self._running: list[_Child] = []
        self._seconds: dict[str, float] = {}
        self._checked = 0.0
        # There is none with `-p no:cacheprovider`.
        self._cache: pytest.Cache | None = getattr(config, "cache", None)

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests, as pytest's own loop does."""
        if self._config.option.collectonly or session.testsfailed:
            return None
        # Processes share it; names in it are made without races.
        self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        waiting = deque(self._longest_first(session.items))
        _import_for_ranks({item.path for item in session.items})
        resource_tracker.ensure_running()
        gc.collect()
        # Pages of these objects stay shared.
        gc.freeze()
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._forks:
                    self._running.append(self._start(session, waiting.popleft()))
                for child in self._ready():
                    waiting.extendleft(self._receive(child))
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
                    if session.shouldstop:
                        raise session.Interrupted(session.shouldstop)
        finally:
            for child in self._running:
                child.process.kill()
        if self._cache is not None:
            self._cache.set(SECONDS, self._cache.get(SECONDS, {}) | self._seconds)
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Says how much processor time all processes took."""
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        minutes = sum(usage.ru_utime + usage.ru_stime for usage in used) / 60
        terminalreporter.write_line(f"{minutes:.1f} minutes of processor time")

    def _longest_first(self, items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
        files: dict[Path, list[pytest.Item]] = {}
        for item in items:
            files.setdefault(item.path, []).append(item)
        last = self._cache.get(SECONDS, {}) if self._cache is not None else {}

        def expected(tests: list[pytest.Item]) -> float:
            file = tests[0].path
            guess = len(tests) * (1.0 if STARTS.search(file.read_text()) else 0.1)
            return float(last.get(self._name(file), guess))

        return sorted(files.values(), key=expected, reverse=True)

    def _name(self, file: Path) -> str:
        return str(file.relative_to(self._config.rootpath))

    def _start(self, session: pytest.Session, items: list[pytest.Item]) -> _Child:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=_run, args=(session, items, theirs))
        process.start()
        theirs.close()
        return _Child(deque(items), process, ours)

    def _ready(self) -> Iterator[_Child]:
        ready = wait([child.reports for child in self._running], POLL_S)
        if time.monotonic() - self._checked > POLL_S:
            for child in self._running:
                child.end_if_stuck()
            self._checked = time.monotonic()
        return iter([child for child in self._running if child.reports in ready])

    def _receive(self, child: _Child) -> list[list[pytest.Item]]:
        """Take a message of a process. Returns tests to run in another one: those behind a test that ended it."""
        hook = self._config.hook
        try:
            kind, value = child.reports.recv()
        except EOFError:
            self._running.remove(child)
            child.process.join()
            child.reports.close()
            if not child.items:
                return []
            ended = child.items.popleft()
            text = child.problem or f"the process of this file ended with status {child.process.exitcode}"
            hook.pytest_runtest_logreport(
                report=pytest.TestReport(ended.nodeid, ended.location, {}, "failed", text, "call")
            )
            return [list(child.items)] if child.items else []
        if kind == "report":
            hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=self._config, data=value))
        elif kind == "start":
            hook.pytest_runtest_logstart(nodeid=value, location=child.items[0].location)
        else:
            file = self._name(child.file)
            self._seconds[file] = self._seconds.get(file, 0.0) + value
            hook.pytest_runtest_logfinish(nodeid=child.items[0].nodeid, location=child.items[0].location)
            child.items.popleft()
        return []


class _Sender:
    """Sends what a process of a file reports."""

    def __init__(self, config: pytest.Config, reports: Connection) -> None:
        self._config = config
        self._reports = reports

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports.send(("start", nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.send(("report", data))


def _run(session: pytest.Session, items: list[pytest.Item], reports: Connection) -> None:
    """Run tests in this process, which was forked for them."""
    config = session.config
    plugins = config.pluginmanager
    for name in ("terminalreporter", "junitxml"):
        if plugins.has_plugin(name):
            plugins.unregister(name=name)
    plugins.register(_Sender(config, reports))
    # The files into which output is captured are shared with other processes.
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    fork_ranks_from_here()
    fork_commands_from_here()
    for item, following in zip(items, [*items[1:], None], strict=True):
        start = time.monotonic()
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        reports.send(("end", time.monotonic() - start))
        if session.shouldfail or session.shouldstop:
            break
    reports.close()


def fork_ranks_from_here() -> None:
    """Let the `forkserver` of multiprocessing be a fork of this process, with all that is imported here."""

    def fork(_path: Any, _arguments: Any, descriptors: Sequence[int]) -> int:
        process = os.fork()
        if process:
            return process
        status = 1
        try:
            forget_open_files({0, 1, 2, *filter(None, (resource_tracker.getfd(), *descriptors))})
            serve: Any = forkserver.main
            serve(*descriptors, [])
            status = 0
        finally:
            os._exit(status)

    resource_tracker.ensure_running()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    # Not that of the process from which this one was forked.
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    with mock.patch.object(util, "spawnv_passfds", fork):
        server.ensure_running()
    # After those that end ranks. Waited for, so that the time of all ranks counts as that of this process.
    util.Finalize(None, _kill, args=(server._forkserver_pid,), exitpriority=0)


def _kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
