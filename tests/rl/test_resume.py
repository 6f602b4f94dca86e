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
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from helpers.equality import relative_error
from helpers.rank_pool import on_ranks
from helpers.runs import (
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
from helpers.trainers import make_sequences, plan_and_recompute
from trimtab.cli.main import main
from trimtab.errors import InputError
from trimtab.rl import run as run_module
from trimtab.rl.checkpoint import last_checkpoint
from trimtab.rl.config import resumed
from trimtab.rl.run import run_training
from trimtab.rl.trainer import Trainer

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
    """Load on any number of ranks; save unchanged, and again after one update on given sequences."""
    ranks = dist.get_world_size()
    config, _ = resumed(out, {})
    trainer = Trainer(replace(config, out=out / f"{ranks} ranks", mini_batches=1), last_checkpoint(out))
    trainer.save(0)
    trainer.update(*plan_and_recompute(trainer, make_sequences(16)[trainer.rank :: ranks]), 10)
    trainer.save(1)


def test_another_number_of_ranks_continues_from_the_same_weights_and_optimizer(straight: Path, tmp_path: Path) -> None:
    out = stopped_after(straight, 3, tmp_path / "out")
    for ranks in (1, 2, 4):
        (out / f"{ranks} ranks").mkdir()
        on_ranks(save_again_and_update, (out,), ranks=ranks)
    for file in ("model.safetensors", "trainer/optimizer-00000.safetensors"):
        before = out / "checkpoints" / "step-00003" / file
        one, two, four = (out / f"{ranks} ranks" / "checkpoints" for ranks in (1, 2, 4))
        for again in (one, two, four):
            assert (again / "step-00000" / file).read_bytes() == before.read_bytes()
            assert (again / "step-00001" / file).read_bytes() != before.read_bytes()
        expected = load_file(two / "step-00001" / file)
        for other in (one, four):
            actual = load_file(other / "step-00001" / file)
            assert expected.keys() == actual.keys()
            for name, value in expected.items():
                assert relative_error(actual[name], value) < 1e-4, name


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


def test_two_runs_never_write_to_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(out=tmp_path)
    start_another = mock.Mock(side_effect=lambda _: run_training(config))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(run_module, "last_checkpoint", start_another)
    for number in (1, 2):
        with pytest.raises(InputError, match="another run is writing there"):
            run_training(config)
        # The first of the two is not refused, also after another has ended.
        assert start_another.call_count == number


def test_runs_that_can_not_be_resumed_are_refused_in_one_line(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(straight, out)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    state = out / "checkpoints" / f"step-{STEPS:05d}" / "trainer" / "state.json"
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
    weights, metrics = state.parents[1] / "model.safetensors", (out / "metrics.jsonl").read_bytes()
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    expect_refusal(out, [], f"{weights}: it has changed since it was written", capsys)
    assert (out / "metrics.jsonl").read_bytes() == metrics
    assert sorted(tmp_path.rglob("*")) == before
    state.write_text("{}")
    expect_refusal(out, [], f"{state}: expected the state of a run after {STEPS} steps", capsys)
    (out / "settings.json").write_text('{"ranks": 2, "colour": "red"}')
    expect_refusal(out, [], "settings.json: expected the settings of a run", capsys)


def expect_refusal(out: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--out", str(out), "--resume", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
