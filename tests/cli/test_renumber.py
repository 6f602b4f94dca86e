"""`trimtab renumber` and `trimtab trace renumber`, on a checkpoint in two files."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trimtab.array_type import Array
from trimtab.cli.main import main
from trimtab.planner import SequenceCounts
from trimtab.renumber.checkpoint import INDEX
from trimtab.trace import RoutingTrace, read_trace, synthesize, write_trace
from trimtab.trace.numbering import FILE, Numbering

EXPERTS, LAYERS = 16, (1, 3)
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 8192, "num_hidden_layers": 4, "num_experts": EXPERTS,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16384, "num_attention_heads": 4, "num_key_value_heads": 2,
    "decoder_sparse_step": 2, "vocab_size": 64, "intermediate_size": 512,
}  # fmt: skip
COMMAND = ("--ranks", "4", "--ranks-per-node", "2", "--sampled", "1")

Printed = Callable[..., str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint whose values say which expert they are of; tensors of an expert lie in two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    files: list[dict[str, Array]] = [{}, {}]
    for layer in LAYERS:
        block = f"model.layers.{layer}.mlp"
        for expert in range(EXPERTS):
            for part, name in enumerate(("gate", "up", "down")):
                value = np.full((2, 3), 100 * layer + expert, np.float16)
                files[part % 2][f"{block}.experts.{expert}.{name}_proj.weight"] = value
        files[0][f"{block}.gate.weight"] = np.arange(EXPERTS, dtype=np.float32)[:, None] + 100 * np.ones(
            (1, 4), np.float32
        )
    files[1]["model.layers.1.self_attn.q_norm.weight"] = np.arange(EXPERTS, dtype=np.float32)
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {name: file for file, tensors in zip(names, files, strict=True) for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "original").mkdir()
    return folder


def skewed(steps: int, *, seed: int = 0, zipf: float = 1.2) -> RoutingTrace:
    """Routing whose hot experts are on one rank, in decoder layers 1 and 3."""
    made = synthesize(
        num_sequences=32 * steps, sequence_length=256, num_layers=2, num_experts=EXPERTS, top_k=2, zipf=zipf, seed=seed
    )
    counts_LE = SequenceCounts.from_trace(made).counts_SLE.sum(axis=0)
    together_LE = np.argsort(-counts_LE.astype(np.int64), axis=1, kind="stable")
    of_step = np.repeat(np.arange(steps, dtype=np.int32), 32)
    return replace(made.permuted(together_LE), steps=of_step, layer_indices=np.array(LAYERS, np.int32))


def weights(folder: Path) -> dict[str, Array]:
    """All tensors, by the index; each is in the file that it names."""
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(index.values())}
    assert sum(map(len, files.values())) == len(index)
    return {name: files[file][name] for name, file in index.items()}


def first_ids(folder: Path) -> dict[int, list[int]]:
    return {int(layer): ids for layer, ids in json.loads((folder / FILE).read_text())["first_ids"].items()}


def test_experts_router_and_index_are_permuted_together(tmp_path: Path, model: Path, printed: Printed) -> None:
    write_trace(skewed(3), tmp_path / "trace.parquet")
    shown = printed("renumber", model, "--trace", tmp_path / "trace.parquet", *COMMAND, "-o", tmp_path / "new")
    assert "2 layers" in shown
    assert "made from" in shown
    found, before, first = weights(tmp_path / "new"), weights(model), first_ids(tmp_path / "new")
    assert sorted(first) == list(LAYERS)
    for layer, ids in first.items():
        assert sorted(ids) == list(range(EXPERTS)) != ids
        for new, old in enumerate(ids):
            for name in ("gate", "up", "down"):
                part = f"model.layers.{layer}.mlp.experts.{{}}.{name}_proj.weight"
                assert np.array_equal(found[part.format(new)], before[part.format(old)])
        router = f"model.layers.{layer}.mlp.gate.weight"
        assert np.array_equal(found[router], before[router][ids])
    name = "model.layers.1.self_attn.q_norm.weight"
    assert np.array_equal(found[name], before[name])
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(
        [path.name for path in model.iterdir() if path.is_file()] + [FILE]
    )


def test_gains_are_those_of_steps_that_the_order_was_not_made_from(
    tmp_path: Path, model: Path, printed: Printed
) -> None:
    write_trace(skewed(3), tmp_path / "trace.parquet")
    printed(
        "renumber",
        model,
        "--trace",
        tmp_path / "trace.parquet",
        *COMMAND,
        "-o",
        tmp_path / "new",
        "--json",
        tmp_path / "a",
    )
    figures = json.loads((tmp_path / "a").read_text())
    static = figures["strategies"]["nothing"]
    assert (figures["steps_of_order"], figures["steps_simulated"]) == (1, 2)
    assert static["gain"] == pytest.approx(1 - static["after_s"] / static["before_s"])
    assert static["gain"] > 0.02
    # The renumbered model's trace, simulated as any other, takes the seconds that were promised.
    printed(
        "trace",
        "renumber",
        tmp_path / "trace.parquet",
        "--checkpoint",
        tmp_path / "new",
        "-o",
        tmp_path / "mapped.parquet",
    )
    again: Any = printed(
        "simulate",
        tmp_path / "mapped.parquet",
        *COMMAND,
        "--model",
        tmp_path / "new",
        "--policy",
        "static",
        "--json",
        "-",
    )
    assert json.loads(again)["policies"]["static"]["step_time_s"] == pytest.approx(static["after_s"])


def test_a_trace_is_mapped_there_and_back(tmp_path: Path, model: Path, printed: Printed, error_of: Printed) -> None:
    trace = skewed(2)
    write_trace(trace, tmp_path / "trace.parquet")
    printed("renumber", model, "--trace", tmp_path / "trace.parquet", *COMMAND, "-o", tmp_path / "new")
    printed(
        "trace",
        "renumber",
        tmp_path / "trace.parquet",
        "--checkpoint",
        tmp_path / "new",
        "-o",
        tmp_path / "mapped.parquet",
    )
    mapped, first = read_trace(tmp_path / "mapped.parquet"), first_ids(tmp_path / "new")
    # Readers sort the ids of a token.
    in_first = np.stack(
        [np.array(first[layer])[mapped.expert_ids[:, place]] for place, layer in enumerate(LAYERS)], axis=1
    )
    assert np.array_equal(np.sort(in_first, axis=-1), np.sort(trace.expert_ids, axis=-1))
    printed("trace", "renumber", tmp_path / "mapped.parquet", "--checkpoint", model, "-o", tmp_path / "back.parquet")
    assert np.array_equal(read_trace(tmp_path / "back.parquet").expert_ids, np.sort(trace.expert_ids, axis=-1))
    # Recorded by the new model, and nothing says so but the option.
    write_trace(replace(mapped, numbering=trace.numbering), tmp_path / "plain.parquet")
    printed(
        "trace", "renumber", tmp_path / "plain.parquet", "--recorded-by", tmp_path / "new", "--checkpoint", model,
        "-o", tmp_path / "plain_back.parquet",
    )  # fmt: skip
    assert np.array_equal(read_trace(tmp_path / "plain_back.parquet").expert_ids, np.sort(trace.expert_ids, axis=-1))
    assert "renumbered in 2 layers" in printed("trace", "info", tmp_path / "mapped.parquet")
    error = error_of("analyze", tmp_path / "mapped.parquet", tmp_path / "trace.parquet", "--ranks", 4)
    assert "numberings" in error


def test_undone_and_renumbered_again(tmp_path: Path, model: Path, printed: Printed, error_of: Printed) -> None:
    write_trace(skewed(2), tmp_path / "trace.parquet")
    trace = ("--trace", tmp_path / "trace.parquet", *COMMAND)
    printed("renumber", model, *trace, "-o", tmp_path / "new")
    assert "does not say" in error_of("renumber", tmp_path / "new", *trace, "-o", tmp_path / "newer")
    # It has first ids, from which the second order starts: nothing is left to gain.
    write_trace(replace(read_trace(tmp_path / "trace.parquet"), numbering=Numbering()), tmp_path / "trace.parquet")
    assert "below 1%" in error_of("renumber", tmp_path / "new", *trace, "-o", tmp_path / "newer")
    # Recorded by the renumbered model, in which other experts are hot.
    recorded = replace(skewed(2, seed=7), numbering=Numbering.of_checkpoint(tmp_path / "new"))
    write_trace(recorded, tmp_path / "other.parquet")
    printed("renumber", tmp_path / "new", "--trace", tmp_path / "other.parquet", *COMMAND, "-o", tmp_path / "newer")
    for folder in ("new", "newer"):
        printed("renumber", tmp_path / folder, "--undo", "-o", tmp_path / f"{folder}-undone")
        undone, before = weights(tmp_path / f"{folder}-undone"), weights(model)
        assert undone.keys() == before.keys()
        assert all(np.array_equal(undone[name], before[name]) for name in before)
        assert not (tmp_path / f"{folder}-undone" / FILE).exists()
    assert "first ids" in error_of("renumber", model, "--undo", "-o", tmp_path / "other")


def spoil(model: Path, what: str) -> None:
    """Change a checkpoint so that it can't be renumbered."""
    file = next(model.glob("*-00001-of-*"))
    tensors = load_file(file)
    block = "model.layers.1.mlp"
    if what == "type":
        (model / "config.json").write_text(json.dumps(CONFIG | {"model_type": "my_moe"}))
    elif what == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif what == "garbage":
        file.write_bytes(b"\x10" + bytes(7) + b"[" * 16)
    elif what == "file":
        file.unlink()
    elif what == "router":
        del tensors[f"{block}.gate.weight"]
    elif what == "expert":
        del tensors[f"{block}.experts.5.gate_proj.weight"]
    elif what == "shape":
        tensors[f"{block}.gate.weight"] = tensors[f"{block}.gate.weight"][1:]
    elif what == "unknown tensor":
        tensors[f"{block}.load_memory"] = np.zeros(EXPERTS, np.float32)
        index = json.loads((model / INDEX).read_text())
        index["weight_map"][f"{block}.load_memory"] = file.name
        (model / INDEX).write_text(json.dumps(index))
    if what in ("router", "expert", "shape", "unknown tensor"):
        save_file(tensors, file)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("cut", "not a whole"),
        ("garbage", "not a whole"),
        ("file", "names model-00001"),
        ("router", "found no router's weight"),
        ("expert", "missing for expert 5"),
        ("shape", "expected 16 experts first"),
        ("unknown tensor", "load_memory"),
    ],
)
def test_what_is_unclear_is_refused_and_nothing_written(
    what: str, message: str, tmp_path: Path, model: Path, error_of: Printed
) -> None:
    write_trace(skewed(2), tmp_path / "trace.parquet")
    spoil(model, what)
    command = ("renumber", model, "--trace", tmp_path / "trace.parquet", *COMMAND, "-o", tmp_path / "new")
    assert message in error_of(*command)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "trace.parquet"]


def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, model: Path, error_of: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trace(skewed(2), tmp_path / "trace.parquet")
    # A note says that it is left out.
    (model / "original").rmdir()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    command = ("renumber", model, "--trace", tmp_path / "trace.parquet", *COMMAND, "-o", tmp_path / "new")
    assert "No space left" in error_of(*command)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "trace.parquet"]


def test_patterns_name_the_tensors_of_an_unknown_type(
    tmp_path: Path, model: Path, printed: Printed, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(skewed(2), tmp_path / "trace.parquet")
    spoil(model, "type")
    spoil(model, "unknown tensor")
    command = ["renumber", model, "--trace", tmp_path / "trace.parquet", *COMMAND, "-o", tmp_path / "new"]
    patterns = ["--pattern", r"experts\.(\d+)\.", "--pattern", r"gate\.weight$"]
    for options, message in (
        ([], "model type 'my_moe'"),
        (patterns, "load_memory"),
        (["--pattern", "(a.(b))"], "(a.(b)): more than one group"),
        (["--pattern", "(a"], "no regular expression"),
    ):
        assert main([str(word) for word in command + options]) == 2
        # After a note that the type is not known.
        assert message in capsys.readouterr().err.splitlines()[-1]
    printed(*command, *patterns, "--pattern", "load_memory")
    first = first_ids(tmp_path / "new")[1]
    router = "model.layers.1.mlp.gate.weight"
    assert np.array_equal(weights(tmp_path / "new")[router], weights(model)[router][first])


def test_even_routing_and_an_existing_folder_are_refused(tmp_path: Path, model: Path, error_of: Printed) -> None:
    write_trace(skewed(2, zipf=0.0), tmp_path / "even.parquet")
    command = ("renumber", model, "--trace", tmp_path / "even.parquet", *COMMAND)
    assert "below 1%, not written" in error_of(*command, "-o", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    write_trace(skewed(2), tmp_path / "even.parquet")
    for folder in (model, model / "new"):
        assert "exists, or is in" in error_of(*command, "-o", folder)
    assert "expected the folder of a checkpoint" in error_of("renumber", tmp_path, *command[2:], "-o", tmp_path / "new")
    assert "--undo" in error_of("renumber", model, "-o", tmp_path / "new")
