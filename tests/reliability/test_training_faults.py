"""Runs of `recipes.rl` survive faults: one line names each, nothing is left over, and the resumed run is the same."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from helpers.runs import (
    MODES,
    assert_same_run,
    count_steps,
    metrics_of,
    processes_under,
    ranks_under,
    run,
    settings,
    stopped_after,
    straight_run,
    train_command,
    words_of_mode,
)  # fmt: skip
from trimtab.launch.launcher import is_suspended
from trimtab.runtime.ranks.lockstep import COMPARE_AFTER_S

STEPS = 24
# For what never ends; a busy machine may take minutes to start a run.
DEADLINE_S = 1800
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    return straight_run(tmp_path_factory.mktemp("straight"), STEPS)


@pytest.fixture(scope="module")
def straight_in(straight: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """An uninterrupted run in a mode of `MODES`."""
    known = {"plan": straight}

    def run_once(mode: str) -> Path:
        if mode not in known:
            known[mode] = straight_run(tmp_path_factory.mktemp(mode), STEPS, mode)
        return known[mode]

    return run_once


@pytest.fixture(scope="module")
def stopped(straight: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed while it wrote a checkpoint. Tests leave it as it is."""
    return stopped_after(straight, STEPS - 2, tmp_path_factory.mktemp("stopped") / "out")


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    # Background processes ignore SIGINT, and so do their children.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        train_command(out, *more, "--resume"), stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=heed,
    )  # fmt: skip


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def have_ended(leader: int) -> bool:
    return not processes_under(leader)


def partial_checkpoints(out: Path) -> list[Path]:
    return list(out.glob("checkpoints/.step-*.partial"))


def wait_for_moment(moment: str, process: subprocess.Popen[str], out: Path, rng: random.Random) -> None:
    """Return at a random time of a moment of the run: while it starts, trains, or writes a checkpoint."""
    if moment == "start":
        wait_for(lambda: ranks_under(process.pid) or process.poll() is not None, "ranks didn't start")
        time.sleep(rng.uniform(0, 6))
        return
    steps = count_steps(out)

    def reached() -> bool:
        nonlocal steps
        before, steps = steps, count_steps(out)
        return bool(partial_checkpoints(out)) if moment == "checkpoint" else steps > before

    # A file of an earlier fault is removed before training begins.
    wait_for(lambda: not partial_checkpoints(out) or process.poll() is not None, "an incomplete checkpoint stays")
    wait_for(lambda: reached() or process.poll() is not None, f"no {moment}")
    time.sleep(rng.uniform(0, 0.05 if moment == "checkpoint" else 0.5))


# Signals by victim, the exit status, and the message.
FAULTS: dict[str, tuple[dict[str, signal.Signals], int, str]] = {
    "kill -9 of a rank": ({"rank": signal.SIGKILL}, 1, "was killed by SIGKILL; the run was stopped"),
    "kill -9 of the launcher": ({"launcher": signal.SIGKILL}, -signal.SIGKILL, ""),
    "kill -9 of all": ({"all": signal.SIGKILL}, -signal.SIGKILL, ""),
    "SIGTERM of a rank": ({"rank": signal.SIGTERM}, 1, "was killed by SIGTERM; the run was stopped"),
    "SIGTERM of the launcher": ({"launcher": signal.SIGTERM}, -signal.SIGTERM, ""),
    "SIGTERM of all": ({"all": signal.SIGTERM}, -signal.SIGTERM, ""),
    "Ctrl-C": ({"all": signal.SIGINT}, 130, "python -m recipes.rl.train: interrupted"),
    "a suspended rank, then kill -9 of the launcher": (
        {"rank": signal.SIGSTOP, "launcher": signal.SIGKILL}, -signal.SIGKILL, "",
    ),
}  # fmt: skip


def options_of(mode: str, straight: Path) -> list[str]:
    return ["--model", str(straight.parent / "model"), *settings(STEPS), *words_of_mode(mode)]


@pytest.mark.parametrize("moment", ["start", "step", "checkpoint"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_with_faults_of_processes_equals_an_uninterrupted_one(
    mode: str, moment: str, straight_in: Callable[[str], Path], tmp_path: Path
) -> None:
    seed = time.time_ns() % 1_000_000
    rng = random.Random(seed)
    straight = straight_in(mode)
    out, options = tmp_path / "out", options_of(mode, straight)
    # A rank continues with its launcher once it has begun.
    names = [name for name in FAULTS if moment != "start" or "suspended" not in name]
    for name in rng.sample(names, len(names)):
        signals, status, message = FAULTS[name]
        where = f"seed {seed}: {name}, {mode}, {moment}"
        process = start(out, *options)
        try:
            wait_for_moment(moment, process, out, rng)
            assert process.poll() is None, f"{where}: the run had ended"
            ranks = ranks_under(process.pid)
            for victim, number in signals.items():
                if victim == "all":
                    os.killpg(process.pid, number)
                else:
                    os.kill(process.pid if victim == "launcher" else rng.choice(ranks), number)
            print(where, flush=True)
            _, error = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == status, (where, error)
            assert message in error, (where, error)
            assert error.count("\n") == (1 if message else 0), (where, error)
            wait_for(partial(have_ended, process.pid), f"{where}: processes stay")
            assert not [path for pid in ranks for path in SHARED_MEMORY.glob(f"trimtab-{pid}-*")], where
        finally:
            if processes_under(process.pid) or process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    run(train_command(out, *options, "--resume"))
    assert_same_run(out, straight, STEPS)


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_is_suspended_for_longer_than_ranks_compare_calls_continues(
    mode: str, straight_in: Callable[[str], Path], tmp_path: Path
) -> None:
    """Other ranks wait; none takes it for dead, and nothing is planned without it."""
    seed = time.time_ns() % 1_000_000
    rng = random.Random(seed)
    straight, out = straight_in(mode), tmp_path / "out"
    process = start(out, *options_of(mode, straight))
    try:
        for moment in ("start", "step", "step"):
            wait_for_moment(moment, process, out, rng)
            rank = rng.choice(ranks_under(process.pid))
            os.kill(rank, signal.SIGSTOP)
            wait_for(partial(is_suspended, rank), "a rank runs")
            time.sleep(2 * COMPARE_AFTER_S + 1)
            os.kill(rank, signal.SIGCONT)
        _, error = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, (seed, error)
        assert all(" waits in " in line for line in error.splitlines()), (seed, error)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert_same_run(out, straight, STEPS)


def test_a_suspended_run_continues(straight: Path, stopped: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(stopped, out)
    process = start(out)
    try:
        wait_for_moment("step", process, out, random.Random(0))
        os.killpg(process.pid, signal.SIGSTOP)
        wait_for(lambda: all(map(is_suspended, ranks_under(process.pid))), "ranks run")
        os.killpg(process.pid, signal.SIGCONT)
        assert process.wait(DEADLINE_S) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert_same_run(out, straight, STEPS)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_run_continues_with_another_number_of_ranks(
    ranks: int, straight: Path, stopped: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(stopped, out)
    run(train_command(out, "--resume", "--ranks", str(ranks)))
    assert [line["step"] for line in metrics_of(out)] == list(range(STEPS))
    assert metrics_of(out)[: STEPS - 2] == metrics_of(straight)[: STEPS - 2]
    assert sorted(path.name for path in (out / "checkpoints").iterdir())[-1] == f"step-{STEPS:05d}"


@pytest.mark.parametrize("day_s", [-86_400, 86_400], ids=["set back", "set forward"])
def test_a_run_continues_after_the_clock_was(
    day_s: int, straight: Path, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a day, and again by an hour every few calls. The files of the run are from the future, or from long ago."""
    out = tmp_path / "out"
    shutil.copytree(stopped, out)
    then = time.time() - day_s
    for path in out.rglob("*"):
        os.utime(path, (then, then))
    (tmp_path / "sitecustomize.py").write_text(
        "import itertools, time\nclock, calls = time.time, itertools.count()\n"
        f"time.time = lambda: clock() + {day_s} + {day_s // 24} * (next(calls) // 5)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    run(train_command(out, "--resume"))
    assert_same_run(out, straight, STEPS)
