"""Imports take limited memory and time, whatever a file asks for, and leave nothing behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.every_dump import LENGTHS, NUM_EXPERTS, all_dumps, routes
from helpers.hostile_dumps import HOSTILE
from trimtab import InputError, RoutingTrace
from trimtab.cli.main import main
from trimtab.trace.formats import bounded_import as module
from trimtab.trace.formats.bounded_import import SMALL_FILE, Limits, bounded_import
from trimtab.trace.formats.normalise import Summary
from trimtab.trace.formats.records import ImportOptions

# These start commands, or import files in another process.
pytestmark = pytest.mark.slow

MODEL = ImportOptions(num_experts=NUM_EXPERTS)
# A recorded count needs it.
TOP_8 = ImportOptions(num_experts=NUM_EXPERTS, top_k=8)
# Runs an import, and prints the most memory and the processor time that its child took. This process is small: its
# memory counts as that of its children.
MEASURED = """
import pickle, resource, sys
from trimtab import InputError
from trimtab.trace.formats.bounded_import import bounded_import
from trimtab.trace.formats.normalise import Summary
files, form, options, limits = pickle.load(sys.stdin.buffer)
try:
    for part in bounded_import(files, form, options, Summary(), limits):
        pass
    print("read")
except InputError as error:
    print(error)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_maxrss, used.ru_utime + used.ru_stime)
"""


@pytest.mark.slow
@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__)
def test_a_small_file_takes_limited_memory_and_time(make: Callable[[], bytes], tmp_path: Path) -> None:
    file = tmp_path / "dump"
    file.write_bytes(make())
    assert file.stat().st_size < SMALL_FILE
    request = pickle.dumps(([file], HOSTILE[make], TOP_8, Limits(seconds=2)))
    result = subprocess.run([sys.executable, "-c", MEASURED], input=request, capture_output=True, check=True)
    message, used = result.stdout.decode().splitlines()
    kilobytes, seconds = used.split()
    # The child's start counts, too.
    assert float(seconds) < 15
    assert message.startswith(f"{file}: ")
    assert int(kilobytes) << 10 < 1 << 30
    assert not result.stderr
    assert list(tmp_path.iterdir()) == [file]


def test_limits_grow_with_the_file() -> None:
    small, large = Limits().of_size(SMALL_FILE), Limits().of_size(100 * SMALL_FILE)
    assert small == Limits().of_size(1) == Limits()
    assert large.seconds == 100 * small.seconds
    assert large.memory == small.memory + 16 * 99 * SMALL_FILE


LIMITED = """
import mmap, sys, time
from pathlib import Path
from trimtab.trace.formats.bounded_import import Limits, ProcessLimits
ProcessLimits(Limits(memory=64 << 20, seconds=1)).apply(Path(sys.argv[0]) if Path(sys.argv[0]).exists() else Path("/"))
deadline = time.monotonic() + 20
"""


@pytest.mark.parametrize(
    ("work", "ended_by"),
    [
        ("while time.monotonic() < deadline: pass", {signal.SIGXCPU, signal.SIGALRM}),
        ("time.sleep(20)", {signal.SIGALRM}),
        ("signal.setitimer(signal.ITIMER_REAL, 0)\nwhile time.monotonic() < deadline: pass", {signal.SIGXCPU}),
    ],
    ids=["busy", "waiting", "busy, without the limit of elapsed time"],
)
def test_a_process_is_ended_in_any_code(work: str, ended_by: set[signal.Signals], tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", f"import signal\n{LIMITED}\n{work}"], cwd=tmp_path, check=False)
    assert -result.returncode in ended_by
    # Not even a core file.
    assert not list(tmp_path.iterdir())


def test_memory_of_any_kind_is_limited(tmp_path: Path) -> None:
    work = "try: mmap.mmap(-1, 65 << 20)\nexcept OSError: print('no memory')\nmmap.mmap(-1, 32 << 20)\nprint('memory')"
    result = subprocess.run([sys.executable, "-c", f"{LIMITED}\n{work}"], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n") == ["no memory", "memory", ""]


def test_every_file_has_limits_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(all_dumps()["slime"].content)
    calls: list[Any] = []

    class Recorder:
        def __init__(self, limits: Limits) -> None:
            calls.append(limits)

        def apply(self, file: Path) -> Limits:
            calls.append(file)
            return Limits()

    monkeypatch.setattr(module, "ProcessLimits", Recorder)
    answers: list[Any] = []
    module._answer((files, None, MODEL, Summary(), Limits(seconds=3)), answers.append)
    # Each file is recognised, then read.
    assert calls == [Limits(seconds=3), files[0], *files, *files]
    assert [answer for answer in answers if isinstance(answer, Path)] == [files[1], *files]
    assert answers[-1].sequences == 2 * len(LENGTHS)


def test_the_child_reads_as_this_process_does(tmp_path: Path) -> None:
    for name, dump in all_dumps().items():
        if name not in ("slime", "megatron"):
            continue
        (tmp_path / name).write_bytes(dump.content)
        summary = Summary()
        trace = RoutingTrace.concatenate(list(bounded_import([tmp_path / name], None, MODEL, summary)))
        assert summary.format == dump.form
        assert trace.num_tokens == summary.tokens == sum(map(len, routes()))


def test_modules_in_the_users_folder_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("import pathlib; pathlib.Path('mark').touch()")
    (tmp_path / "dump.pt").write_bytes(all_dumps()["slime"].content)
    monkeypatch.chdir(tmp_path)
    assert list(bounded_import([Path("dump.pt")], None, MODEL, Summary()))
    assert not Path("mark").exists()


def test_a_reader_that_dies_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dump.pt").write_bytes(all_dumps()["slime"].content)
    # A process that is ended as the system does when memory is short.
    monkeypatch.setattr(sys, "executable", str(tmp_path / "killed"))
    (tmp_path / "killed").write_text("#!/bin/sh\nkill -9 $$\n")
    os.chmod(tmp_path / "killed", 0o755)
    assert main(["trace", "import", str(tmp_path / "dump.pt"), "-o", str(tmp_path / "out.parquet")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "dump.pt: its reader was ended by SIGKILL" in error
    assert not list(tmp_path.glob("*.parquet*"))


def test_an_import_that_is_given_up_ends_its_child(tmp_path: Path) -> None:
    ids = np.tile(np.arange(8, dtype=np.uint8), (50_000, 48, 1))
    np.save(tmp_path / "a.npy", ids)
    parts = bounded_import([tmp_path / "a.npy"] * 4, "vllm", MODEL, Summary())
    next(parts)
    child = _children()
    assert len(child) == 1
    parts.close()
    assert not _children()
    with pytest.raises(InputError, match=r"b\.npy: can't be read"):
        list(bounded_import([tmp_path / "b.npy"], "vllm", MODEL, Summary()))


def _children() -> list[str]:
    """Process ids of this process's readers."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [each for each in found if b"bounded_import" in Path(f"/proc/{each}/cmdline").read_bytes()]
