"""What a run writes is on disk before it counts: a machine that fails loses no checkpoint and no line of metrics."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from trimtab.rl.checkpoint import write_checkpoint
from trimtab.rl.run_log import RunLog
from trimtab.rl.task import build_tokenizer


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
    sizes = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "moe_intermediate_size": 4, "num_experts": 2}
    config = Qwen3MoeConfig(**sizes, num_experts_per_tok=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    weights = AutoModelForCausalLM.from_config(config).state_dict().items()
    moments = [("weight", {"exp_avg": torch.ones(2)})]
    write_checkpoint(tmp_path, 3, {"sums": 0.5}, [[0, 1]], config, build_tokenizer(), weights, moments, {})
    folder = tmp_path / "checkpoints"
    renamed = len(events) - 1 - events[::-1].index("renamed")
    partial = folder / ".step-00003.partial"
    written = {*(folder / "step-00003").rglob("*"), folder / "step-00003"}
    assert {partial / path.relative_to(folder / "step-00003") for path in written} <= {*map(Path, events[:renamed])}
    assert events[renamed + 1 :] == [str(folder)]


def test_a_line_of_metrics_is_on_disk_when_its_step_ends(tmp_path: Path, events: list[str]) -> None:
    log = RunLog(tmp_path, first_step=0, is_writer=True)
    log.record({"step": 0, "reward": 1.0})
    assert events == [str(tmp_path / "metrics.jsonl")]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    log.close()
