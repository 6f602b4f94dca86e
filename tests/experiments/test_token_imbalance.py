"""Trace v1 of Megatron-LM's token-imbalance benchmark: one sequence a source rank; damage is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness import run_command
from experiments import token_imbalance
from helpers.pickled_dumps import saved
from helpers.response_dumps import routes
from helpers.token_imbalance_files import trace_v1, write_files
from trimtab import InputError, read_trace
from trimtab.cli.main import main

EXPERTS, TOP_K, RANKS = 16, 4, 4
IDS = routes(40, 1, TOP_K, EXPERTS, "int64")[:, 0]
# Ranks take turns, and one of them has no token.
SOURCES = np.array([0, 1, 3, 1] * 10)
FILES = trace_v1(IDS, SOURCES, EXPERTS, RANKS)


@pytest.mark.parametrize(("top_k", "experts"), [(1, 8), (8, 128), (8, 256)])
def test_tokens_of_a_source_rank_are_a_sequence(tmp_path: Path, top_k: int, experts: int) -> None:
    ids = routes(40, 1, top_k, experts, "int64")[:, 0]
    manifest = write_files(trace_v1(ids, SOURCES, experts, RANKS, step_id=3, logical_layer_id=7), tmp_path)
    records = list(token_imbalance.read(manifest))
    assert [record.where for record in records] == [f"source rank {rank}" for rank in (0, 1, 3)]
    for record, rank in zip(records, (0, 1, 3), strict=True):
        np.testing.assert_array_equal(record.ids[:, 0], ids[rank == SOURCES])
        assert (record.step, record.layers, record.domain) == (3, (7,), "W2_hot_rank")


def test_folders_of_several_steps_become_one_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifests = [
        write_files(trace_v1(IDS + step, SOURCES, EXPERTS + 1, RANKS, step_id=step), tmp_path / f"step-{step}")
        for step in range(2)
    ]
    out = tmp_path / "out.parquet"
    assert run_command("experiments.token_imbalance", [*map(str, manifests), "-o", str(out)]) == 0
    trace = read_trace(out)
    assert (trace.num_experts, trace.top_k, trace.steps.tolist()) == (EXPERTS + 1, TOP_K, [0, 0, 0, 1, 1, 1])
    expected = np.concatenate([(IDS + step)[rank == SOURCES] for step in range(2) for rank in (0, 1, 3)])
    np.testing.assert_array_equal(np.sort(trace.expert_ids[:, 0]), np.sort(expected))
    words = ["--model", "qwen3-30b-a3b", "--ranks", "1", "--micro-steps", "1", "--policy", "static"]
    assert main(["simulate", str(out), "--set", "num_experts=17", "--set", "num_experts_per_tok=4", *words]) == 0
    assert "static" in capsys.readouterr().out


def changed_manifest(**more: Any) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        files["manifest.json"] = json.dumps(json.loads(files["manifest.json"]) | more).encode()

    return change


def changed_description(name: str, **more: Any) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        manifest = json.loads(files["manifest.json"])
        manifest["tensors"][name] |= more
        files["manifest.json"] = json.dumps(manifest).encode()

    return change


def exchanged_tensor(name: str) -> Callable[[dict[str, bytes]], None]:
    return lambda files: files.update({f"tensors/{name}.pt": saved(torch.zeros(3))})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed_manifest(schema_version=2), "schema_version is 2; only version 1 is known"),
        (changed_manifest(schema_version=True), "schema_version is True"),
        (changed_manifest(tensors=None), "no tensors"),
        (changed_manifest(world_size=3), "source ranks are 0 to 3; there are 3 ranks"),
        (changed_manifest(num_experts=None), "num_experts should be a whole number"),
        (changed_manifest(topk=2), r"expert_ids.pt: its shape is \[40, 4\]; .*should be \[40, 2\]"),
        (changed_manifest(logical_num_tokens=41), r"expert_ids.pt: its shape is \[40, 4\]"),
        (changed_description("source_rank", shape=[41]), r"source_rank.pt: it is int32 \[40\], unlike"),
        (changed_description("expert_ids", dtype="int32"), r"expert_ids.pt: it is int64 \[40, 4\], unlike"),
        (changed_description("gates", file="../gates.pt"), "the file of gates should be tensors/gates.pt"),
        (changed_description("token_ids", sha256="0" * 64), "token_ids.pt: damaged or exchanged"),
        *((exchanged_tensor(name), f"{name}.pt: damaged or exchanged") for name in token_imbalance.TENSORS),
        (lambda files: files.pop("tensors/gates.pt"), "gates.pt: no such file beside the manifest"),
        (lambda files: files.update(trace_v1(IDS[:0], SOURCES[:0], EXPERTS, RANKS)), "it has no tokens"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: Callable[[dict[str, bytes]], None], message: str) -> None:
    files = dict(FILES)
    change(files)
    with pytest.raises(InputError, match=message):
        list(token_imbalance.read(write_files(files, tmp_path)))


def test_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    manifests = [write_files(trace_v1(IDS, SOURCES, n, RANKS), tmp_path / str(n)) for n in (16, 128)]
    with pytest.raises(InputError, match=r"the manifests have \[16, 128\] experts"):
        token_imbalance.read_traces(manifests)
