"""Batches of every framework are read as they are held, without reading ids in the call or keeping arrays alive."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.framework_batches import BATCHES, EXPERTS, LAYERS, MODEL, PADDED, PROMPT, TOP_K, random_sequences
from trimtab.observe import Observer
from trimtab.observe.borrowed import Room
from trimtab.observe.frameworks import FRAMEWORKS
from trimtab.trace import ImportOptions, read_trace

ARRAYS = sorted(set(BATCHES) - {"sglang", "nemo_rl_messages"})


def observe(form: str, folder: Path | None = None, **options: Any) -> Observer:
    return Observer(BATCHES[form][0], ranks=4, model=MODEL, token_budget=64, folder=folder, **options)


@pytest.mark.parametrize("form", BATCHES)
def test_traces_hold_what_was_handed_over(form: str, tmp_path: Path) -> None:
    sequences = random_sequences(np.random.default_rng(1), 12)
    with observe(form, tmp_path, rank=3) as observer:
        observer.record(BATCHES[form][1](sequences), 7)
        assert observer.flush(300)
        figures = {name.split("/")[-1]: value for name, value in observer.metrics().items()}
    trace = read_trace(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["rank-3-000000.parquet"]
    found = sorted(trace.sequence(s).tolist() for s in range(trace.num_sequences))
    assert found == sorted(np.sort(ids, axis=2).tolist() for ids in sequences)
    assert set(trace.steps.tolist()) == {7}
    assert set(trace.prompt_lengths.tolist()) == ({0} if form == "ms_swift" else {PROMPT})
    assert set(trace.domains.tolist()) == ({"math"} if form in ("verl", "slime", "roll") else {""})
    assert not trace.sequence_hashes.any()
    assert (figures["step"], figures["observed_share"], figures["dropped_samples"]) == (7, 1, 0)
    tokens = sum(map(len, sequences))
    if form in PADDED:
        fed = tokens + len(sequences)
        width = max(map(len, sequences)) + 3
        padding = len(sequences) * width - fed
        # The share of rows, of which the last token has none.
        assert figures["padding_share"] == pytest.approx(padding / (padding + tokens))
        assert figures["padding_same_expert"] == 1
    else:
        assert figures["padding_share"] == 0
        assert "padding_same_expert" not in figures


@pytest.mark.parametrize("form", ARRAYS)
def test_nothing_keeps_arrays_alive_for_which_there_is_no_room(form: str) -> None:
    name, made = BATCHES[form]
    sequences = random_sequences(np.random.default_rng(2), 6)
    batch = made(sequences)
    routes = weakref.ref(_routes(batch))
    samples = FRAMEWORKS[name].samples(batch, Room(0), ImportOptions(EXPERTS))
    assert len(samples) == len(sequences)
    assert all(sample.owner.get() is not None for sample in samples)
    del batch
    sequences.clear()
    gc.collect()
    assert routes() is None
    assert all(sample.owner.get() is None for sample in samples)


@pytest.mark.parametrize("form", BATCHES)
def test_what_there_is_room_for_is_kept_and_given_back(form: str) -> None:
    name, made = BATCHES[form]
    size = 1 << 20
    room, batch = Room(size), made(random_sequences(np.random.default_rng(3), 6))
    samples = FRAMEWORKS[name].samples(batch, room, ImportOptions(EXPERTS))
    del batch
    gc.collect()
    assert all(sample.owner.get() is not None for sample in samples)
    assert not room.take(size)
    samples.clear()
    gc.collect()
    assert room.take(size)


def _routes(batch: Any) -> Any:
    """One of the arrays with ids."""
    while isinstance(batch, list):
        batch = batch[0]
    if hasattr(batch, "batch"):
        batch = batch.batch
    if hasattr(batch, "outputs"):
        batch = batch.outputs[0]
    fields = batch if isinstance(batch, dict) else vars(batch)
    found = next(value for name, value in fields.items() if "expert" in name)
    return found[0] if isinstance(found, list) else found


@pytest.mark.parametrize("form", BATCHES)
def test_a_batch_without_routes_is_reported_once(form: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with observe(form) as observer:
        for step in range(3):
            observer.record({"nothing": 1}, step)
        assert observer.flush(300)
        assert sum(observer.metrics().values()) >= 0
    assert len(caplog.records) == 1
    assert "can't be read" in caplog.text or "no response holds routed_experts" in caplog.text


def test_routes_on_a_device_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    import torch

    with observe("miles") as observer:
        ids = torch.zeros((3, LAYERS, TOP_K), dtype=torch.int32, device="meta")
        observer.record([{"rollout_routed_experts": ids, "tokens": [1] * 4}], 0)
        observer.flush(300)
    assert "on a meta device" in caplog.text
