"""A resumed run equals an uninterrupted one: same steps, same weights, no duplicates, no leftover files."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from helpers.equality import relative_error
from helpers.rank_pool import on_ranks
from helpers.runs import (
    assert_equal,
    assert_same_run,
    count_steps,
    processes_under,
    ranks_under,
    run,
    settings,
    stopped_after,
    straight_run,
    train_command,
)  # fmt: skip
from helpers.trainers import make_responses, plan_and_recompute
from recipes.rl.checkpoint import last_checkpoint
from recipes.rl.config import TrainConfig, resumed
from recipes.rl.train import Trainer, main

pytestmark = pytest.mark.nightly
STEPS = 5


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    return straight_run(tmp_path_factory.mktemp("straight"), STEPS)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(straight: Path, tmp_path: Path) -> None:
    out = stopped_after(straight, 2, tmp_path / "out")
    printed = run(train_command(out, "--resume"))
    assert "continuing after 2 of 5 steps" in printed
    assert "warm start ━" not in printed
    assert_same_run(out, straight, STEPS)


def save_again_and_update(out: Path) -> None:
    """Load on any number of ranks; save unchanged, and again after one update on given responses."""
    ranks = dist.get_world_size()
    config, _ = resumed(TrainConfig, out, {})
    trainer = Trainer(replace(config, out=out / f"{ranks} ranks", mini_batches=1), last_checkpoint(out))
    trainer.save(0)
    trainer.update(*plan_and_recompute(trainer, make_responses(16)[trainer.rank :: ranks]), 10)
    trainer.save(1)


def test_another_number_of_ranks_continues_from_the_same_weights_and_optimizer(straight: Path, tmp_path: Path) -> None:
    out = stopped_after(straight, 3, tmp_path / "out")
    for ranks in (1, 2, 4):
        (out / f"{ranks} ranks").mkdir()
        on_ranks(save_again_and_update, (out,), ranks=ranks)

    def state_of(folder: Path, step: int) -> dict[str, Any]:
        """Weights and optimizer state by name."""
        checkpoint = folder / "checkpoints" / f"step-{step:05d}"
        optimizer = torch.load(checkpoint / "trainer.pt", weights_only=True)["optimizer"]
        moments = {f"{key}/{name}": optimizer[name][key] for name in optimizer for key in ("exp_avg", "exp_avg_sq")}
        return load_file(checkpoint / "model.safetensors") | moments

    before, two = state_of(out, 3), state_of(out / "2 ranks", 1)
    for ranks in (1, 2, 4):
        assert_equal(state_of(out / f"{ranks} ranks", 0), before)
        updated = state_of(out / f"{ranks} ranks", 1)
        for name, value in two.items():
            assert relative_error(updated[name], value) < 1e-4, name
            assert not torch.equal(value, before[name]), name


@pytest.mark.long
def test_a_run_killed_at_random_moments_ends_like_an_uninterrupted_one(straight: Path, tmp_path: Path) -> None:
    """Kills the whole run, its launcher, or one rank, while it starts, trains, or writes."""
    seed = time.time_ns() % 1_000_000
    rng = random.Random(seed)
    out, model = tmp_path / "out", straight.parent / "model"
    command = train_command(out, "--model", str(model), *settings(STEPS), "--resume")
    seen: list[int] = []
    for kill in range(3):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            lines = count_steps(out)
            deadline = time.monotonic() + 60
            while kill and count_steps(out) == lines and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.5 if kill else 12))
            ranks = ranks_under(process.pid)
            seen += ranks
            victim = rng.choice(["all", "launcher", "rank"])
            if victim == "all":
                os.killpg(process.pid, signal.SIGKILL)
            elif process.poll() is None:
                os.kill(rng.choice(ranks) if victim == "rank" and ranks else process.pid, signal.SIGKILL)
            killed_at = time.monotonic()
            _, error = process.communicate(timeout=30)
            while processes_under(process.pid):
                assert time.monotonic() - killed_at < 30, f"seed {seed}: processes stay after a kill of {victim}"
                time.sleep(0.05)
            assert process.returncode in (0, -signal.SIGKILL) or "was killed by SIGKILL" in error, (seed, error)
        finally:
            if processes_under(process.pid) or process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert not [pid for pid in seen if list(Path("/dev/shm").glob(f"trimtab-{pid}-*"))]
    run(command)
    assert_same_run(out, straight, STEPS)


def test_runs_that_can_not_be_resumed_are_refused_in_one_line(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(straight, out)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    cases = {
        "--seed 3": f"--seed is 3; the run in {out} has 0",
        "--model elsewhere": f"--model is {Path.cwd()}/elsewhere; the run in {out} has",
        "--mini-batches 1": f"--mini-batches is 1; the run in {out} has 2",
        "--steps 2": f"--steps is 2; the run in {out} has done 5 already",
        "--ranks 3": "3 ranks don't divide 8 experts",
    }
    before = sorted(tmp_path.rglob("*"))
    for options, message in cases.items():
        expect_refusal(out, options.split(), message, capsys)
    expect_refusal(tmp_path / "other", [], "other: no run to resume there (no settings.json)", capsys)
    assert sorted(tmp_path.rglob("*")) == before
    state = out / "checkpoints" / f"step-{STEPS:05d}" / "trainer.pt"
    state.write_bytes(state.read_bytes()[:1000])
    expect_refusal(out, [], f"{state.parent}: no checkpoint of this version", capsys)
    (out / "settings.json").write_text('{"ranks": 2, "colour": "red"}')
    expect_refusal(out, [], "settings.json: expected the settings of a run", capsys)


def expect_refusal(out: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(out), "--resume", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
