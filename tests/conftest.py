"""Settings and fixtures of all tests."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from helpers.forked_files import ForkedFiles
from mutants.function_map import FOLDER, CallRecorder

if TYPE_CHECKING:
    from helpers.rank_pool import RankPool

# As commands compile, so that all processes of the run share kernels. Numba reads it when it is imported.
assert "numba" not in sys.modules
os.environ.setdefault("NUMBA_CPU_NAME", "generic")
# Before anything of Trimtab is imported.
_recorder = CallRecorder(Path(os.environ[FOLDER])) if FOLDER in os.environ else None
# Commands print the same whether they compile kernels or find them.
logging.getLogger("trimtab").addFilter(lambda record: "compiling kernels" not in record.getMessage())
# The same examples every time, and nothing that depends on the machine's speed; or random ones.
hypothesis.settings.load_profile("ci")
hypothesis.settings.register_profile("nightly", hypothesis.settings.get_profile("ci"), derandomize=False)
# Sessions check sampled weights as each micro-step begins; ranks inherit it.
os.environ.setdefault("TRIMTAB_VERIFY_WEIGHTS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--forks`."""
    parser.addoption("--forks", type=int, default=0, help="run files in this number of forked processes")


def pytest_configure(config: pytest.Config) -> None:
    """Runs files in processes of their own if `--forks` is given; notes calls if `make mutants` asks for it."""
    if not config.getoption("--hypothesis-profile"):
        # Examples depend on the test alone, not on constants of the modules that are imported by then.
        providers._get_local_constants = lambda: providers._local_constants
    # Commands print the same however long they take.
    vars(importlib.import_module("trimtab.cli.output"))["SAID_EVERY_S"] = 1e6
    if _recorder is not None:
        config.pluginmanager.register(_recorder)
    if config.option.forks:
        config.pluginmanager.register(ForkedFiles(config, config.option.forks))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start ranks or a browser are `slow`."""
    for item in items:
        if {"pool", "browser"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two ranks that all tests share, with a dictionary that the tests of one file share."""
    # Most tests do without torch.
    from helpers.rank_pool import shared_pool

    pool = shared_pool(2)
    yield pool
    pool.forget()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how many tests of pages did not run for want of a browser."""
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    if count := sum("no browser" in reason for reason in skipped):
        terminalreporter.write_line(f"{count} tests of pages did not run: no Chromium or Chrome is on PATH")
