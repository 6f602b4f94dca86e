"""Imports take limited memory and time, whatever a file asks for, and leave nothing behind."""

from __future__ import annotations

import gzip
import json
import mmap
import multiprocessing
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from helpers.every_dump import NUM_EXPERTS, all_dumps, routes
from helpers.examples import examples
from helpers.hostile_dumps import (
    HOSTILE,
    many_objects,
    nested_axes,
    nested_key,
    overlapping_entries,
    packed_text,
    terabytes_of_ids,
)
from trimtab import InputError, RoutingTrace
from trimtab.cli.main import main
from trimtab.trace.formats.bounded_import import SMALL_FILE, Limits, MemoryWatch, ProcessLimits, bounded_import
from trimtab.trace.formats.importing import common_format
from trimtab.trace.formats.normalise import Summary
from trimtab.trace.formats.records import ImportOptions
from trimtab.trace.row_groups import table_of

# These start commands, or import files in another process.
pytestmark = pytest.mark.slow

MODEL = ImportOptions(num_experts=NUM_EXPERTS)
# A recorded count needs it.
TOP_8 = ImportOptions(num_experts=NUM_EXPERTS, top_k=8)
TOP_2 = ImportOptions(num_experts=NUM_EXPERTS, top_k=2)
# Reads each request, and prints the processor time, the most memory of its children so far, and the error. This process
# is small: its memory counts as that of its children.
MEASURED = """
import pickle, resource, sys
from trimtab import InputError
from trimtab.trace.formats.bounded_import import bounded_import
from trimtab.trace.formats.normalise import Summary
before = 0
for files, form, options, limits in pickle.load(sys.stdin.buffer):
    error = "read"
    try:
        for part in bounded_import(files, form, options, Summary(), limits):
            pass
    except InputError as refused:
        error = str(refused)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(used.ru_utime + used.ru_stime - before, used.ru_maxrss, error)
    before = used.ru_utime + used.ru_stime
"""
# Others take the time or memory of the test of every file's own limits, or are refused in the same way.
SHORT = [nested_axes, many_objects, overlapping_entries, packed_text]


@pytest.mark.longer
def test_small_files_take_limited_memory_and_time(tmp_path: Path) -> None:
    files = {tmp_path / make.__name__: make for make in examples(short=SHORT, long=list(HOSTILE))}
    for file, make in files.items():
        file.write_bytes(make())
        assert file.stat().st_size < SMALL_FILE
    requests = pickle.dumps([([file], HOSTILE[make], TOP_8, Limits(seconds=2)) for file, make in files.items()])
    result = subprocess.run([sys.executable, "-c", MEASURED], input=requests, capture_output=True, check=True)
    for file, line in zip(files, result.stdout.decode().splitlines(), strict=True):
        seconds, kilobytes, message = line.split(maxsplit=2)
        # The child's start counts, too.
        assert float(seconds) < 15
        assert int(kilobytes) << 10 < 1 << 30
        assert message.startswith(f"{file}: ")
    assert not result.stderr
    assert set(tmp_path.iterdir()) == set(files)


def test_limits_grow_with_the_file() -> None:
    small, large = Limits().of_size(SMALL_FILE), Limits().of_size(100 * SMALL_FILE)
    assert small == Limits().of_size(1) == Limits()
    assert large.seconds == 100 * small.seconds
    assert large.memory == small.memory + 16 * 99 * SMALL_FILE


def test_a_file_that_ends_the_reader_is_named(tmp_path: Path) -> None:
    """The second one, although the first is read by the same process."""
    small, large, content = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", all_dumps()["vllm:jsonl"].content
    small.write_bytes(content)
    # A small file, so with the limits of one, that takes many times as long on any machine.
    large.write_bytes(gzip.compress(content * (20 * SMALL_FILE // len(content)), compresslevel=1, mtime=0))
    assert large.stat().st_size < SMALL_FILE
    with pytest.raises(InputError, match=r"b\.jsonl\.gz: takes more than 1 s of processor time"):
        list(bounded_import([small, large], "vllm", MODEL, Summary(), Limits(seconds=1)))


def forked(work: Callable[[], None], folder: Path) -> int:
    """Exit status of a process in `folder` that does this work; -signal if a signal ended it."""

    def run() -> None:
        os.chdir(folder)
        work()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def compute() -> None:
    while time.process_time() < 20:
        pass


def test_a_process_is_ended_in_any_code(tmp_path: Path) -> None:
    def limited() -> None:
        ProcessLimits(Limits(seconds=1)).apply(Path("/"))
        compute()

    assert forked(limited, tmp_path) == -signal.SIGXCPU
    # Not even a core file.
    assert not list(tmp_path.iterdir())


def test_elapsed_time_is_not_limited(tmp_path: Path) -> None:
    """On a busy machine a process waits for others."""

    def limited() -> None:
        ProcessLimits(Limits(seconds=1)).apply(Path("/"))
        time.sleep(2.5)

    assert forked(limited, tmp_path) == 0


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="limits are read in /proc")
def test_a_valid_dump_is_imported_however_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few MB, by a reader of the lowest priority that is stopped for longer than its processor time may be."""
    ids = np.argsort(np.random.default_rng(0).random((256, 48, 64)), axis=2)[:, :, :8]
    line = json.dumps({"model": "m", "choices": [{"routed_experts": ids.tolist()}]})
    (tmp_path / "dump.jsonl").write_text(f"{line}\n" * 10)
    assert (tmp_path / "dump.jsonl").stat().st_size > 3 << 20
    stopped: list[int] = []

    def stop_when_limited(pid: int) -> None:
        while "unlimited" in re.findall("Max cpu time(.*)", Path(f"/proc/{pid}/limits").read_text())[0].split()[0]:
            time.sleep(0.001)
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)
        time.sleep(6)
        os.kill(pid, signal.SIGCONT)

    class Slow(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            os.setpriority(os.PRIO_PROCESS, self.pid, 19)
            Thread(target=stop_when_limited, args=(self.pid,)).start()

    monkeypatch.setattr(bounded_import.__globals__["subprocess"], "Popen", Slow)
    options, summary = ImportOptions(num_experts=64), Summary()
    begin = time.monotonic()
    parts = list(bounded_import([tmp_path / "dump.jsonl"], None, options, summary, Limits(seconds=5)))
    assert time.monotonic() - begin > 6
    assert len(stopped) == 1
    assert sum(part.num_sequences for part in parts) == summary.sequences == 10


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    """Reading it might never end."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: is not a regular file"):
        list(bounded_import([tmp_path / "pipe"], "slime", MODEL, Summary()))


@pytest.fixture
def unlimited_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.setattr("trimtab.trace.formats.bounded_import.memory_is_limited", lambda: False)


@pytest.mark.usefixtures("unlimited_memory")
def test_memory_is_watched_where_it_is_not_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader is ended when it reads the second file, which is named."""
    read: list[Path] = []

    class Noted(MemoryWatch):
        def begin(self, file: Path) -> None:
            read.append(file)
            super().begin(file)

    monkeypatch.setattr("trimtab.trace.formats.bounded_import.MemoryWatch", Noted)
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_bytes(all_dumps()["slime"].content)
    files[1].write_bytes(many_objects())
    limits = Limits(memory=64 << 20)
    assert len(list(bounded_import(files[:1], "slime", MODEL, Summary(), limits))) == 1
    with pytest.raises(InputError, match=r"b: takes more than 64 MiB of memory"):
        list(bounded_import(files, "slime", MODEL, Summary(), limits))
    assert read == [files[0], *files]


def test_the_watched_memory_is_that_of_the_file_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.trace.formats.bounded_import._START_BYTES", 0)
    for name, size in (("small", 1), ("large", 4 * SMALL_FILE)):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)
    with subprocess.Popen(["sleep", "600"]) as child:
        watch = MemoryWatch(child, Limits(memory=1), tmp_path / "large")
        time.sleep(0.5)
        assert child.poll() is None
        watch.begin(tmp_path / "small")
        assert child.wait() == -signal.SIGKILL
    assert watch.exceeded


@pytest.mark.usefixtures("unlimited_memory")
def test_systems_that_do_not_tell_memory_import_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="dumps are imported where memory is limited or told"):
        list(bounded_import([tmp_path / "file"], "slime", MODEL, Summary()))


def test_memory_of_any_kind_is_limited(tmp_path: Path) -> None:
    def limited() -> None:
        ProcessLimits(Limits(memory=64 << 20)).apply(Path("/"))
        with pytest.raises(OSError, match="memory"):
            mmap.mmap(-1, 65 << 20)
        mmap.mmap(-1, 32 << 20)

    assert forked(limited, tmp_path) == 0


@pytest.mark.parametrize(
    ("make", "limits", "form", "taken"),
    [
        (nested_key, Limits(seconds=2), "slime", "takes more than 2 s"),
        (
            many_objects,
            Limits(memory=300 << 20),
            "slime",
            "not a readable pickle: it takes more memory",
        ),
        (terabytes_of_ids, Limits(memory=300 << 20), "sglang-recorder", "takes more than 300 MiB"),
    ],
    ids=["time", "pickle", "memory"],
)
def test_every_file_has_limits_of_its_own(
    make: Callable[[], bytes], limits: Limits, form: str, taken: str, tmp_path: Path
) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    dumps = all_dumps()
    files[0].write_bytes(dumps["slime" if form == "slime" else f"{form}:counts"].content)
    files[1].write_bytes(make())
    with pytest.raises(InputError, match=f"^{files[1]}: {taken}"):
        list(bounded_import(files, form, TOP_2, Summary(), limits))
    files[1].write_bytes(files[0].read_bytes())
    begun: list[Path] = []
    assert common_format(files, begin=begun.append) == (form, files)
    assert begun == files


def test_limits_are_those_of_the_file_that_is_read(tmp_path: Path) -> None:
    """What earlier files took does not count, and what they were allowed is not left to later ones."""
    for name, size in (("small", 1), ("large", 100 * SMALL_FILE)):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)

    def read_in_turn() -> None:
        process = ProcessLimits(Limits(seconds=3))
        memory: dict[str, int] = {}
        for name in ("small", "large", "small"):
            start = time.process_time()
            process.apply(Path(name))
            allowed = Limits(seconds=3).of_size(os.stat(name).st_size)
            limit, processor = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU))
            assert start + allowed.seconds <= processor < start + allowed.seconds + 2
            assert memory.setdefault(name, limit) == limit
            # More than a second, since the limit of processor time is in whole seconds.
            while time.process_time() < start + 1.1:
                pass
        assert memory["large"] - memory["small"] == Limits().of_size(100 * SMALL_FILE).memory - Limits().memory

    assert forked(read_in_turn, tmp_path) == 0


def test_the_child_reads_as_this_process_does(tmp_path: Path) -> None:
    for name in ("slime", "megatron"):
        dump = all_dumps()[name]
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


def test_a_reader_that_is_killed_while_the_trace_is_written_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a system without memory."""
    killed: list[str] = []

    def killing(part: RoutingTrace, schema: object) -> object:
        assert list(tmp_path.glob(".out.parquet.*.partial"))
        for child in _children() if not killed else []:
            killed.append(child)
            os.kill(int(child), signal.SIGKILL)
        return table_of(part, schema)

    monkeypatch.setattr("trimtab.trace.row_groups.table_of", killing)
    for name in "abcd":
        np.save(tmp_path / f"{name}.npy", np.tile(np.arange(8, dtype=np.uint8), (50_000, 48, 1)))
    files = [str(path) for path in sorted(tmp_path.iterdir())]
    words = ["--format", "vllm", "--num-experts", str(NUM_EXPERTS), "-o", str(tmp_path / "out.parquet")]
    assert main(["trace", "import", *files, *words]) == 2
    assert len(killed) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert ".npy: its reader was ended by SIGKILL, as for lack of memory" in error
    assert sorted(str(path) for path in tmp_path.iterdir()) == files


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
    found = [pid for tasks in Path("/proc/self/task").glob("*/children") for pid in tasks.read_text().split()]
    return [each for each in found if b"formats.bounded_import" in Path(f"/proc/{each}/cmdline").read_bytes()]
