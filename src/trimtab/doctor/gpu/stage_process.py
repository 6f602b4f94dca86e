"""`run_stage`: a stage on all ranks, in a process group of its own with a timeout.

A hang or a crash is a result: the finding says where each rank was, and names a file with the stacks of all its threads
and what the stage printed. Afterwards no process of the stage and none of its shared memory is left.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

import trimtab
from trimtab.doctor.finding import Finding
from trimtab.errors import InputError, RankFailedError
from trimtab.files import write_atomically
from trimtab.interrupts import interrupts_later, take_interrupts
from trimtab.launch import launch
from trimtab.launch.launcher import exit_with_parent, has_ended
from trimtab.messages import show_messages
from trimtab.shared_files import remove_shared_files

PACKAGE = str(Path(trimtab.__file__).parent)
# Ranks write their stacks so many seconds before the stage is killed.
DUMP_S = 3.0
# The driver may need some time to end a process.
ENDING_S = 10.0
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


@dataclass(frozen=True)
class Stage:
    """One stage of `trimtab doctor --gpu`.

    Attributes:
        name: one word.
        run: called on every rank, with the default process group ready; returns the findings of this rank. It must be
            a function of a module, since it runs in other processes.
        timeout_s: seconds after which it hangs, starting its processes included.
    """

    name: str
    run: Callable[[], list[Finding]]
    timeout_s: float


@dataclass(frozen=True)
class StageResult:
    """What a stage found.

    Attributes:
        name: of the stage.
        findings: at least one.
        seconds: that it took.
    """

    name: str
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def status(self) -> str:
        """The worst status of the findings."""
        return max((finding.status for finding in self.findings), key=("ok", "warning", "problem").index)


def run_stage(stage: Stage, ranks: int, folder: Path) -> StageResult:
    """Run a stage on local ranks.

    Args:
        folder: an existing folder for the stage's files. It is removed unless the stage hung or crashed.
    """
    files = folder / stage.name
    files.mkdir()
    start = time.monotonic()
    process = multiprocessing.get_context("spawn").Process(
        target=_lead,
        # Pickled, so that the leader need not import what ranks need.
        args=(os.getpid(), pickle.dumps(stage.run), ranks, files, time.monotonic() + stage.timeout_s - DUMP_S),
    )
    with interrupts_later():
        process.start()
    try:
        is_done = bool(wait([process.sentinel], stage.timeout_s))
    finally:
        # It leads its group. Before `wait` and `join` have reaped it, no other group gets its number.
        assert process.pid
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        _end_ranks([int(path.stem.split("-")[2]) for path in files.glob("rank-*-*.txt")])
    seconds = time.monotonic() - start
    failure = files / "failure.json"
    findings = merge([_read_findings(files / f"findings-{rank}.json") for rank in range(ranks)])
    if is_done and process.exitcode == 0 and not failure.exists():
        _remove(files)
        return StageResult(stage.name, tuple(findings), seconds)
    if not is_done:
        text = f"no result after {stage.timeout_s:.0f} s, it was killed; {where_ranks_are(files, ranks)}"
    elif failure.exists():
        text = json.loads(failure.read_text())
    else:
        text = f"its process ended with exit status {process.exitcode}"
    text += f"; stacks and output: {_write_dump(files)}"
    # What a rank found before it ended may be why others did not.
    causes = [finding for finding in findings if finding.status == "problem"]
    ending = Finding("crash" if is_done else "hang", "problem", text)
    return StageResult(stage.name, (*causes, ending), seconds)


def _end_ranks(pids: Sequence[int]) -> None:
    """Wait until killed ranks have ended, so that they hold no memory of a GPU, and remove their shared memory."""
    deadline = time.monotonic() + ENDING_S
    while not all(map(has_ended, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in pids:
        remove_shared_files(pid)


def _lead(parent: int, run: bytes, ranks: int, files: Path, dump_time: float) -> None:
    """Launch the ranks, as leader of a session with them alone."""
    os.setsid()
    take_interrupts(signal.SIG_DFL)
    threading.Thread(target=exit_with_parent, args=(parent,), daemon=True).start()
    with (files / "output.txt").open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    show_messages(logging.WARNING)
    try:
        launch(_on_rank, (run, files, dump_time), ranks=ranks)
    except (InputError, RankFailedError) as error:
        (files / "failure.json").write_text(json.dumps(str(error)))


def _on_rank(run: bytes, files: Path, dump_time: float) -> None:
    """Run a stage on this rank, and write its findings. Warnings that Trimtab logs are findings, too."""
    rank = dist.get_rank()
    # The name has the process, whose shared memory is removed if it is killed.
    stacks = (files / f"rank-{rank}-{os.getpid()}.txt").open("w")
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(max(0.1, dump_time - time.monotonic()), file=stacks)
    logged = _Warnings()
    logging.getLogger("trimtab").addHandler(logged)
    findings = pickle.loads(run)() + [Finding("log", "warning", text) for text in logged.texts]
    write_atomically(files / f"findings-{rank}.json", json.dumps([asdict(finding) for finding in findings]))


class _Warnings(logging.Handler):
    """Collects messages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _read_findings(path: Path) -> list[Finding]:
    """None if the rank has not written them."""
    return [] if not path.exists() else [Finding(**finding) for finding in json.loads(path.read_text())]


def merge(by_rank: Sequence[Sequence[Finding]]) -> list[Finding]:
    """The findings of all ranks: those of the first, and warnings and problems of others.

    Where ranks differ in a check, its warnings and problems name their ranks.
    """
    ranks_of: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            if rank == 0 or finding.status != "ok":
                ranks_of.setdefault(finding, []).append(rank)
    merged = []
    for finding, ranks in ranks_of.items():
        checked = [rank for rank, findings in enumerate(by_rank) if finding.name in {each.name for each in findings}]
        # Some checks are of the first rank only.
        if finding.status != "ok" and (ranks != checked or 0 not in ranks):
            text = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {finding.text}"
            merged.append(replace(finding, text=text))
        else:
            merged.append(finding)
    return merged


def where_ranks_are(files: Path, ranks: int) -> str:
    """The innermost call in Trimtab of each rank's main thread, as their stacks have it."""
    places = []
    for rank in range(ranks):
        found = list(files.glob(f"rank-{rank}-*.txt"))
        place = innermost_call(found[0].read_text()) if found else "had not joined the others"
        places.append(f"rank {rank} {place}")
    return ", ".join(places)


def innermost_call(stacks: str) -> str:
    """The innermost call in Trimtab of the main thread, from what faulthandler wrote of all threads."""
    threads = [text for text in stacks.split("\n\n") if FRAME.search(text)]
    if not threads:
        return "wrote no stack"
    # The main thread is last.
    for path, line, function in FRAME.findall(threads[-1]):
        if path.startswith(PACKAGE) and not function.startswith("<"):
            return f"in {function} ({os.path.relpath(path, PACKAGE)}:{line})"
    return "outside of Trimtab"


def _write_dump(files: Path) -> Path:
    """Join stacks and output of all ranks in one file, in place of the others."""
    dump = files.with_suffix(".txt")
    with dump.open("w") as joined:
        for path in sorted(files.glob("rank-*.txt")):
            _, rank, process = path.stem.split("-")
            _append(joined, f"rank {rank} (process {process})", path)
        _append(joined, "output", files / "output.txt")
    _remove(files)
    return dump


def _append(joined: TextIO, title: str, path: Path) -> None:
    text = path.read_text(errors="replace") if path.exists() else ""
    joined.write(f"---- {title}\n{text or '(nothing)'}\n")


def _remove(files: Path) -> None:
    for path in files.iterdir():
        path.unlink()
    files.rmdir()
