"""Tests in forked processes: each is reported, also if its process ends. Forked commands behave as new processes."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import forked_commands

ROOT = Path(__file__).parents[1]
CONFTEST = """
from helpers.forked_files import ForkedFiles
def pytest_configure(config):
    config.pluginmanager.register(ForkedFiles(config, 2))
"""
MIXED = """
import pytest
def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
@pytest.fixture
def broken(): raise ValueError
def test_set_up(broken): pass
"""
ENDING = """
import os, signal
def test_before(): pass
def test_killed(): os.kill(os.getpid(), signal.SIGKILL)
def test_after(): pass
def test_exits(): os._exit(0)
"""


HANGING = """
import threading
def test_before(): pass
def wait_for_ever():
    lock = threading.Lock()
    lock.acquire(); lock.acquire()
def test_hangs(): wait_for_ever()
def test_after(): pass
"""


def outcomes(folder: Path, *options: str) -> tuple[dict[str, str], str]:
    """What a run of the folder's tests reports of each, and its output."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = '{ROOT / 'tests'}'\n")
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *options]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    output = ended.stdout + ended.stderr
    found = re.findall(r"^(PASSED|FAILED|ERROR) \w+\.py::test_(\w+)", output, re.MULTILINE)
    return {name: outcome for outcome, name in found}, output


@pytest.mark.slow
def test_every_test_is_reported(tmp_path: Path) -> None:
    (tmp_path / "test_mixed.py").write_text(MIXED)
    (tmp_path / "test_ending.py").write_text(ENDING)
    found, output = outcomes(tmp_path)
    assert found == {
        "passes": "PASSED", "fails": "FAILED", "set_up": "ERROR", "before": "PASSED", "killed": "FAILED",
        "after": "PASSED", "exits": "FAILED",
    }  # fmt: skip
    assert "3 failed, 3 passed, 1 skipped, 1 error" in output
    assert "the process of this file ended with status -9" in output


@pytest.mark.slow
def test_a_test_that_hangs_fails_with_the_place_where_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_TESTS_IDLE_S", "2")
    (tmp_path / "test_hanging.py").write_text(HANGING)
    found, output = outcomes(tmp_path)
    assert found == {"before": "PASSED", "hangs": "FAILED", "after": "PASSED"}
    assert "no progress in 2 s" in output
    assert re.search(r"test_hanging.py., line 6 in wait_for_ever", output)


@pytest.mark.slow
def test_commands_are_those_of_new_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams, status, folder and session; files that are open here are not open there."""
    for owner, name in ((forked_commands.SUBPROCESS, "_fork_exec"), (forked_commands.UTIL, "spawnv_passfds")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    forked_commands.fork_commands_from_here()
    read, write = os.pipe()
    command = [sys.executable, "-m", "trimtab.cli.main", "trace", "info", "missing.parquet"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "missing.parquet" in ended.stderr
    # Nobody reads what it writes.
    os.mkfifo(tmp_path / "pipe")
    words = [sys.executable, "-m", "trimtab.cli.main", "trace", "synth", "uniform", "-o", "pipe"]
    waiting = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while os.getsid(waiting.pid) != waiting.pid:
            assert waiting.poll() is None
            time.sleep(0.01)
        os.close(write)
        # At its end, since nobody else holds the other end.
        assert select.select([read], [], [], 60.0)[0] == [read]
    finally:
        waiting.kill()
    assert waiting.wait() == -signal.SIGKILL
