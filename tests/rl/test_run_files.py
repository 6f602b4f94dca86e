"""Files of a run without training: the last checkpoint, and what a resumed run removes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trimtab.errors import InputError
from trimtab.rl import checkpoint as checkpoint_module
from trimtab.rl.checkpoint import FORMAT, last_checkpoint
from trimtab.rl.run_log import remove_later_steps


def write_state(out: Path, folder: str, step: int) -> None:
    trainer = out / "checkpoints" / folder / "trainer"
    trainer.mkdir(parents=True)
    state = {
        "format": FORMAT,
        "step": step,
        "held_out_accuracy": {},
        "optimizer_files": 1,
        "homes": [[0, 1]],
        "checksums": {},
    }
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
            assert read[name].keys() == values.keys()
            for key, value in values.items():
                assert torch.equal(torch.as_tensor(read[name][key]), value), (name, key)


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
    with pytest.raises(InputError, match="weights: it is missing"):
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
    for name in [*(f"step-{step:05d}.parquet" for step in range(5)), ".step-00004.parquet.17.partial", "notes.txt"]:
        (tmp_path / "routing" / name).touch()
    for name in ("summary.json", "report.html", "timeline.json.gz", "settings.json"):
        (tmp_path / name).touch()
    remove_later_steps(tmp_path, 3)
    kept = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept == [0, 1, 2]
    routing = sorted(path.name for path in (tmp_path / "routing").iterdir())
    assert routing == ["notes.txt", "step-00000.parquet", "step-00001.parquet", "step-00002.parquet"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "routing", "settings.json"]
