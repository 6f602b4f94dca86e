"""Files of a run without training: the last checkpoint, and what a resumed run removes."""

from __future__ import annotations

import json
import re
import resource
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers.trainers import assert_equal_states
from trimtab.errors import InputError
from trimtab.rl import checkpoint as checkpoint_module
from trimtab.rl.checkpoint import FORMAT, last_checkpoint, remove_unfinished
from trimtab.rl.run import _input_errors
from trimtab.rl.run_log import RunLog, kept_metrics, remove_later_steps


def write_state(out: Path, folder: str, step: int) -> None:
    trainer = out / "checkpoints" / folder / "trainer"
    trainer.mkdir(parents=True)
    state = {"format": FORMAT, "step": step, "held_out_accuracy": {}, "optimizer_files": 1, "homes": [[0, 1]]}
    state["checksums"] = {}
    checksum = checkpoint_module._checksum_of_state(state)
    (trainer / "state.json").write_text(json.dumps(state | {"checksum": checksum}))


def test_the_last_complete_checkpoint_is_found(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for step in (2, 99_999, 100_000, 10):
        write_state(tmp_path, f"step-{step:05d}", step)
    write_state(tmp_path, ".step-200000.partial", 200_000)
    # Weights without state.
    (tmp_path / "checkpoints" / "step-100001").mkdir()
    found = last_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, found.directory.name) == (100_000, "step-100000")


def test_optimizer_state_is_the_same_from_one_file_and_from_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {
        name: {"step": torch.tensor(float(size)), "exp_avg": torch.rand(size), "exp_avg_sq": torch.rand(size, 2)}
        for name, size in {"a/b": 3, "c": 5, "d": 2}.items()
    }
    for limit, files in ((1 << 20, 1), (1, 3)):
        out = tmp_path / str(limit)
        (out / "trainer").mkdir(parents=True)
        monkeypatch.setattr(checkpoint_module, "FILE_BYTES", limit)
        assert checkpoint_module._write_optimizer(state.items(), out) == files
        read = checkpoint_module.Checkpoint(out, 0, {}, files, [], {}).optimizer_state()
        assert {*read} == {*state}
        for name, values in state.items():
            assert_equal_states({key: torch.as_tensor(value) for key, value in read[name].items()}, values)


def test_changed_and_missing_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"abc")
    checksum = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    checkpoint = checkpoint_module.Checkpoint(tmp_path, 0, {}, 0, [], {"weights": checksum})
    checkpoint.check_files()
    file.write_bytes(b"abd")
    with pytest.raises(InputError, match="weights: it has changed since it was written"):
        checkpoint.check_files()
    file.unlink()
    with pytest.raises(InputError, match=r"weights: it is missing; .* to continue from the checkpoint before"):
        checkpoint.check_files()


def test_a_changed_state_is_refused(tmp_path: Path) -> None:
    write_state(tmp_path, "step-00002", 2)
    state = tmp_path / "checkpoints" / "step-00002" / "trainer" / "state.json"
    state.write_text(state.read_text().replace("[0, 1]", "[1, 0]"))
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


def test_files_that_can_not_be_written_are_input_errors(tmp_path: Path) -> None:
    message = "No space left on device; when that is solved, continue with --resume"
    with pytest.raises(InputError, match=f"^out: {message}"), _input_errors(Path("out")):
        Path("/dev/full").write_text("metrics")
    with pytest.raises(InputError, match=r"^file: No space left"), _input_errors(Path("out")):
        raise OSError(28, "No space left on device", "file")
    with pytest.raises(ConnectionResetError), _input_errors(Path("out")):
        raise ConnectionResetError(104, "Connection reset by peer")


def test_a_checkpoint_that_can_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "checkpoints" / "step-00001"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write() -> None:
        with checkpoint_module._atomic_directory(target) as folder:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
            save_file({"weights": torch.zeros(1000)}, folder / "model.safetensors")

    try:
        with pytest.raises(InputError, match=rf"{target}: can't be written \(.*File too large.*\); when"):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(target.parent.iterdir())
