"""Files of a run without training: the last checkpoint, what is on disk when, and what a resumed run removes."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import time
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from helpers.runs import assert_same_run
from helpers.trainers import assert_equal_states
from trimtab.errors import InputError
from trimtab.rl import checkpoint as checkpoint_module
from trimtab.rl import run as run_module
from trimtab.rl.checkpoint import last_checkpoint, remove_unfinished, write_checkpoint
from trimtab.rl.run import run_training
from trimtab.rl.run_log import RunLog, kept_metrics, remove_later_steps


@pytest.fixture(autouse=True)
def without_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints have one file in place of a model."""

    def save(_config: Any, _weights: Any, _tokenizer: Any, folder: Path) -> None:
        (folder / "model").write_text("weights")

    monkeypatch.setattr(checkpoint_module, "save_checkpoint", save)


def write(out: Path, step: int, *, optimizer_state: Any = (), algorithm_state: Any = None) -> Path:
    """Write a checkpoint. Returns its folder."""
    write_checkpoint(out, step, {}, [[0, 1]], None, None, [], optimizer_state, algorithm_state or {})
    return out / "checkpoints" / f"step-{step:05d}"


def test_the_last_complete_checkpoint_is_found(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for step in (2, 99_999, 100_000, 10):
        write(tmp_path, step)
    folder = write(tmp_path, 200_000)
    folder.rename(folder.with_name(f".{folder.name}.partial"))
    # Weights without state.
    (tmp_path / "checkpoints" / "step-100001").mkdir()
    found = last_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, found.directory.name) == (100_000, "step-100000")
    # A run that continues writes later ones anew, and those without state.
    for step in (100_000, 100_001):
        (tmp_path / "checkpoints" / f"step-{step}" / "earlier").touch()
        assert not (write(tmp_path, step) / "earlier").exists()
    found = last_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 100_001


def test_optimizer_state_is_the_same_from_one_file_and_from_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {
        name: {"step": torch.tensor(float(size)), "exp_avg": torch.rand(size), "exp_avg_sq": torch.rand(size, 2)}
        for name, size in {"a/b": 3, "c": 5, "d": 2}.items()
    }
    for limit, files in ((1 << 20, 1), (1, 3)):
        monkeypatch.setattr(checkpoint_module, "FILE_BYTES", limit)
        folder = write(tmp_path, files, optimizer_state=state.items())
        assert len(list((folder / "trainer").glob("optimizer-*"))) == files
        checkpoint = last_checkpoint(tmp_path)
        assert checkpoint is not None
        assert checkpoint.optimizer_files == files
        read = checkpoint.optimizer_state()
        assert {*read} == {*state}
        for name, values in state.items():
            assert_equal_states({key: torch.as_tensor(value) for key, value in read[name].items()}, values)


def test_changed_and_missing_files_are_named(tmp_path: Path) -> None:
    """Every file but the state, which has a checksum of itself."""
    folder = write(tmp_path, 2, algorithm_state={"value": torch.ones(2)})
    checkpoint = last_checkpoint(tmp_path)
    assert checkpoint is not None
    checkpoint.check_files()
    files = {path for path in folder.rglob("*") if path.is_file()} - {folder / "trainer" / "state.json"}
    assert {file.name for file in files} == {"model", "optimizer-00000.safetensors", "algorithm.safetensors"}
    for file in files:
        whole = file.read_bytes()
        damaged = bytearray(whole)
        damaged[random.randrange(len(whole))] ^= 1 << random.randrange(8)
        for content in (damaged, whole[:-1]):
            file.write_bytes(content)
            with pytest.raises(InputError, match=f"{file}: it has changed since it was written"):
                checkpoint.check_files()
        file.unlink()
        with pytest.raises(InputError, match=f"{file}: it is missing; .* to continue from the checkpoint before"):
            checkpoint.check_files()
        file.write_bytes(whole)


def test_a_changed_state_is_refused(tmp_path: Path) -> None:
    state = write(tmp_path, 2) / "trainer" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"homes": [[1, 0]]}))
    with pytest.raises(InputError, match="expected the state of a run after 2 steps"):
        last_checkpoint(tmp_path)


def test_a_resumed_run_keeps_the_steps_before_it(tmp_path: Path) -> None:
    (tmp_path / "routing").mkdir()
    lines = [json.dumps({"step": step}) for step in range(5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 5, "rew')
    for name in [*(f"step-{step:05d}.parquet" for step in range(5)), "notes.txt"]:
        (tmp_path / "routing" / name).touch()
    for name in ("summary.json", "report.html", "timeline.json.gz", "settings.json"):
        (tmp_path / name).touch()
    remove_later_steps(tmp_path, 3)
    kept = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept == [0, 1, 2]
    routing = sorted(path.name for path in (tmp_path / "routing").iterdir())
    assert routing == ["notes.txt", "step-00000.parquet", "step-00001.parquet", "step-00002.parquet"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "routing", "settings.json"]


METRICS = [f'{{"step": {step}, "reward": 0.5}}\n' for step in range(4)]
DAMAGED = {
    "garbage": (1, [METRICS[0], "\x00\x00\n", *METRICS[2:]]),
    "not of a step": (1, [METRICS[0], "[1]\n", *METRICS[2:]]),
    "a line is missing": (1, [METRICS[0], *METRICS[2:]]),
    "a line is there twice": (2, [*METRICS[:2], *METRICS[1:]]),
    "the last line is incomplete": (2, [*METRICS[:2], METRICS[2][:-5]]),
    "the last line has no end": (2, [*METRICS[:2], METRICS[2][:-1]]),
    "the last line is missing": (2, METRICS[:2]),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_metrics_are_refused_by_line(damage: str, tmp_path: Path) -> None:
    step, lines = DAMAGED[damage]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(lines))
    message = f"metrics.jsonl: line {step + 1} should have the metrics of step {step}; restore the file, or remove it"
    with pytest.raises(InputError, match=message):
        kept_metrics(tmp_path, 3)
    # Lines of later steps don't matter.
    assert kept_metrics(tmp_path, step) == METRICS[:step]
    with pytest.raises(InputError, match=message):
        remove_later_steps(tmp_path, 3)
    assert file.read_text() == "".join(lines)


def test_a_run_continues_without_removed_metrics(tmp_path: Path) -> None:
    assert kept_metrics(tmp_path, 2) == []
    file = tmp_path / "metrics.jsonl"
    file.touch()
    assert kept_metrics(tmp_path, 2) == []
    file.write_text("".join(METRICS[2:]))
    assert kept_metrics(tmp_path, 3) == METRICS[2:3]
    # From an earlier checkpoint.
    assert kept_metrics(tmp_path, 1) == []


def test_unfinished_files_are_removed(tmp_path: Path) -> None:
    unfinished = ".metrics.jsonl.17.partial routing/.step-00004.parquet.17.partial checkpoints/.step-00002.partial/x"
    others = ["checkpoints/step-00001/model.safetensors", "metrics.jsonl", "notes.partial"]
    for name in (*unfinished.split(), *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    remove_unfinished(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == others


@pytest.mark.parametrize("set_back", [False, True])
def test_tensorboard_shows_every_step_once(set_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that was killed twice; with a clock that was set back by a day each time."""
    EventAccumulator: Any = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator

    start = time.time()
    for run, (first, end) in enumerate([(0, 4), (2, 5), (3, 6)]):
        monkeypatch.setattr(time, "time", lambda run=run: start + 86_400 * run * (-1 if set_back else 1))
        # Not closed: what a killed process has written.
        log = RunLog(tmp_path, first_step=first, is_writer=True)
        for step in range(first, end):
            log.record({"step": step, "reward": float(step + 10 * run)})
    monkeypatch.undo()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [
        (0, 0.0), (1, 1.0), (2, 12.0), (3, 23.0), (4, 24.0), (5, 25.0),
    ]  # fmt: skip
    names = sorted(path.name for path in (tmp_path / "tensorboard").iterdir())
    assert [re.split(r"[.]", name)[3] for name in names][:2] == ["0000000000", "0000000001"]


def test_files_that_can_not_be_written_are_input_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    config: Any = SimpleNamespace(out=tmp_path)
    cases: list[tuple[OSError, type[Exception], str]] = [
        (OSError(28, "No space left on device"), InputError, f"^{tmp_path}: No space left on device; .* --resume"),
        (OSError(28, "No space left on device", "file"), InputError, "^file: No space left"),
        (ConnectionResetError(104, "Connection reset by peer"), ConnectionResetError, ""),
    ]
    for error, expected, message in cases:
        monkeypatch.setattr(run_module, "last_checkpoint", mock.Mock(side_effect=error))
        with pytest.raises(expected, match=message):
            run_training(config)


def test_a_checkpoint_that_can_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(InputError, match=rf"{folder}/step-00001: can't be written \(.*File too large.*\); when"):
            write(tmp_path, 1, algorithm_state={"weights": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(folder.iterdir())


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files and folders as they are synced, and "renamed"."""
    events: list[str] = []
    sync, move = os.fsync, os.replace

    def log_sync(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def log_move(source: Path, target: Path) -> None:
        events.append("renamed")
        move(source, target)

    monkeypatch.setattr(os, "fsync", log_sync)
    monkeypatch.setattr(os, "replace", log_move)
    return events


def test_a_checkpoint_is_on_disk_before_it_has_its_name_and_its_name_after(tmp_path: Path, events: list[str]) -> None:
    folder = write(tmp_path, 3, optimizer_state=[("weight", {"exp_avg": torch.ones(2)})])
    renamed = len(events) - 1 - events[::-1].index("renamed")
    partial = folder.with_name(f".{folder.name}.partial")
    written = {*folder.rglob("*"), folder}
    assert {partial / path.relative_to(folder) for path in written} <= {*map(Path, events[:renamed])}
    assert events[renamed + 1 :] == [str(folder.parent)]


def test_a_line_of_metrics_is_on_disk_when_its_step_ends(tmp_path: Path, events: list[str]) -> None:
    log = RunLog(tmp_path, first_step=0, is_writer=True)
    log.record({"step": 0, "reward": 1.0})
    assert events == [str(tmp_path / "metrics.jsonl")]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    log.close()


def test_the_line_of_a_step_shows_its_planning_time_in_milliseconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(tmp_path, first_step=0, is_writer=True)
    log.step(defaultdict(float, {"step": 3.0, "plan_s": 0.0123}))  # type: ignore[arg-type]
    log.close()
    assert re.search(r"\b12(\.3)? ?ms\b", capsys.readouterr().out)


def test_runs_that_differ_name_step_and_metric(tmp_path: Path) -> None:
    """Also where one has no such metric; times may differ."""
    for other in ({"step": 1, "loss": 0.5, "plan_s": 2.0, "moe/replicas": 3}, {"step": 1, "loss": 0.5}):
        for name, line in (("one", {"step": 1, "loss": 0.5, "plan_s": 1.0, "moe/replicas": 4}), ("other", other)):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "metrics.jsonl").write_text(f"{json.dumps({'step': 0})}\n{json.dumps(line)}\n")
        one, other_run = tmp_path / "one", tmp_path / "other"
        for out, straight in ((one, other_run), (other_run, one)):
            with pytest.raises(AssertionError, match=r"^step 1: .*moe/replicas") as raised:
                assert_same_run(out, straight, 2)
            assert "loss" not in str(raised.value)
            assert "plan_s" not in str(raised.value)
