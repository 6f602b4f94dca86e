"""In every mode, a run that faults stop is the same after it is resumed, and one that they delay is the same at once.

The form for every change, with ranks that are forked; `tests/reliability` stops commands, more often and in more ways.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from helpers.examples import examples, nightly_except
from helpers.rank_pool import on_ranks
from helpers.runs import MODES, assert_same_run, metrics_of, of_mode, open_responses
from recipes.rl.checkpoint import last_checkpoint
from recipes.rl.config import TrainConfig, resumed
from recipes.rl.train import Trainer, run_training
from trimtab.runtime import session_micro_steps
from trimtab.runtime.planning.background_slices import StepSlices
from trimtab.runtime.planning.planning_in_rollout import PlanningInRollout
from trimtab.runtime.ranks import lockstep

STEPS = 4


def config_of(mode: str, folder: Path, out: Path) -> TrainConfig:
    """Of a new run, or of the one that is stopped in `out`."""
    if (out / "settings.json").exists():
        return resumed(TrainConfig, out, {})[0]
    return TrainConfig(out=out, model=folder / "model", steps=STEPS, **of_mode(mode))


def train(config: TrainConfig) -> float:
    """Returns the processor seconds that it takes."""
    start = time.process_time()
    run_training(Trainer, config)
    return time.process_time() - start


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Callable[[str], tuple[Path, list[float]]]:
    """The folder of a mode's run, and the processor seconds of its ranks."""
    known: dict[str, tuple[Path, list[float]]] = {}

    def run(mode: str) -> tuple[Path, list[float]]:
        if mode not in known:
            (out := folder / mode).mkdir()
            known[mode] = out, on_ranks(train, (config_of(mode, folder, out),), ranks=2)
        return known[mode]

    return run


Undisturbed = Callable[[str], tuple[Path, list[float]]]


@pytest.mark.parametrize("mode", nightly_except(MODES, "live"))
def test_runs_of_a_mode_do_what_others_do_not(mode: str, undisturbed: Undisturbed) -> None:
    """So that faults meet replicas of the router's choices, and responses that are open."""
    out, _ = undisturbed(mode)
    metrics, last = metrics_of(out), last_checkpoint(out)
    assert last is not None
    assert any(line["trained_sequences"] > 0 for line in metrics)
    assert (json.loads((out / "settings.json").read_text())["mode"] == "live") == (mode == "live")
    assert ("live/calls" in metrics[0]) == (mode == "live")
    assert (open_responses(last) > 0) == (mode == "t-ppo")


def train_until_killed(config: TrainConfig, victim: int, seconds: float) -> None:
    """Train until a rank has used some processor time."""
    if dist.get_rank() == victim:
        # Nothing handles this signal, so that it ends the process like any other.
        signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        run_training(Trainer, config)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@pytest.mark.longer
@pytest.mark.parametrize("mode", nightly_except(MODES, "t-ppo"))
def test_a_run_whose_rank_is_killed_continues_the_same(
    mode: str, undisturbed: Undisturbed, folder: Path, tmp_path: Path
) -> None:
    straight, seconds = undisturbed(mode)
    seed = examples(short=1, long=time.time_ns() % 1_000_000)
    rng = random.Random(seed)
    killed = 0
    for _ in range(examples(short=1, long=8)):
        victim = rng.randrange(2)
        arguments = config_of(mode, folder, tmp_path), victim, rng.uniform(0.2, 0.9) * seconds[victim]
        try:
            on_ranks(train_until_killed, arguments, ranks=2)
        except AssertionError as error:
            assert f"rank {victim}" in str(error), seed
            killed += 1
    print(f"seed {seed}, killed {killed} times")
    on_ranks(train, (config_of(mode, folder, tmp_path),), ranks=2)
    assert_same_run(tmp_path, straight, STEPS)


@contextmanager
def suspended_now_and_then(seed: int) -> Iterator[None]:
    """A context in which rank 0 suspends rank 1 four times, for longer than it takes to notice that."""
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    ended, rng = threading.Event(), random.Random(seed)

    def suspend() -> None:
        for _ in range(4):
            if ended.wait(rng.uniform(0.05, 0.6)):
                return
            os.kill(pids[1], signal.SIGSTOP)
            time.sleep(0.8)
            os.kill(pids[1], signal.SIGCONT)

    thread = threading.Thread(target=suspend)
    if dist.get_rank() == 0:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if dist.get_rank() == 0:
            thread.join()


def slow(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call after some time, as on a busy machine."""

    def later(*args: Any) -> Any:
        time.sleep(0.1 + 0.1 * dist.get_rank())
        return call(*args)

    return later


def train_disturbed(config: TrainConfig, seed: int) -> None:
    """Train while a rank is suspended, plans come late, and the clock jumps by up to a year."""
    clock, rng = time.time, random.Random(seed)

    def jumping() -> float:
        return clock() + rng.uniform(-3e7, 3e7)

    with (
        mock.patch.object(time, "time", jumping),
        mock.patch.object(lockstep, "COMPARE_AFTER_S", 0.2),
        mock.patch.object(session_micro_steps, "PATIENCE_S", 0.01),
        mock.patch.object(PlanningInRollout, "run", slow(PlanningInRollout.run)),
        mock.patch.object(StepSlices, "_run_round", slow(StepSlices._run_round)),
        suspended_now_and_then(seed),
    ):
        run_training(Trainer, config)


@pytest.mark.longer
@pytest.mark.parametrize("mode", nightly_except(MODES, "plan"))
def test_elapsed_time_and_the_clock_change_nothing(
    mode: str, undisturbed: Undisturbed, folder: Path, tmp_path: Path
) -> None:
    straight, _ = undisturbed(mode)
    seed = examples(short=1, long=time.time_ns() % 1_000_000)
    print(f"seed {seed}")
    on_ranks(train_disturbed, (config_of(mode, folder, tmp_path), seed), ranks=2)
    assert_same_run(tmp_path, straight, STEPS)
