"""Megatron-core's router trace: rows of layers are combined to micro-batches."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.import_items import damaged, dropped, kept
from helpers.response_dumps import json_lines, routes
from trimtab import InputError
from trimtab.array_type import Array
from trimtab.trace.formats import megatron
from trimtab.trace.formats.importing import format_of
from trimtab.trace.formats.records import ImportOptions, Record


def row(ids: Array, layer: int, step: int = 0, **more: Any) -> dict[str, Any]:
    """As `RouterTracer` writes it."""
    return {
        "step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0, "num_tokens": len(ids),
        "topk": ids.shape[1], **more, "top_indices": ids.tolist(),
    }  # fmt: skip


def read(path: Path) -> list[Record]:
    assert format_of(path) == "megatron"
    return kept(megatron.read(path, ImportOptions()))


@pytest.mark.parametrize(("experts", "top_k"), [(255, 8), (256, 8), (257, 8), (384, 22), (16, 1)])
def test_steps_of_inference(tmp_path: Path, experts: int, top_k: int) -> None:
    ids = routes(9, 3, top_k, experts, "int32")
    parts = [ids[:6], ids[6:7], ids[7:]]
    rows = [row(part[:, i], layer, step) for step, part in enumerate(parts) for i, layer in enumerate((1, 2, 5))]
    records = read(json_lines(tmp_path / "router_trace_rank0.jsonl", rows))
    assert [record.where for record in records] == ["line 1, step 0", "line 4, step 1", "line 7, step 2"]
    for record, part, step in zip(records, parts, range(3), strict=True):
        np.testing.assert_array_equal(record.ids, part)
        assert (record.layers, record.step, record.num_tokens, record.prompt_length) == ((1, 2, 5), step, None, 0)


@pytest.mark.parametrize("order", ["one by one", "interleaved"])
def test_micro_batches_of_an_iteration(tmp_path: Path, order: str) -> None:
    """With an interleaved pipeline the first half of the layers sees all micro-batches before the second half does."""
    batches = [routes(5, 4, 2, 8, "int32", seed=1), routes(3, 4, 2, 8, "int32", seed=2)]
    mtp = row(routes(5, 1, 2, 8, "int32")[:, 0], 0, block="mtp", mtp_idx=0)
    if order == "one by one":
        rows = [each for batch in batches for each in (*(row(batch[:, layer], layer) for layer in range(4)), mtp)]
    else:
        halves = ((0, 1), (2, 3))
        rows = [mtp, *(row(batch[:, layer], layer) for half in halves for batch in batches for layer in half), mtp]
    rows += [row(batches[0][:, layer], layer, step=1) for layer in range(4)]
    records = read(json_lines(tmp_path / "a.jsonl", rows))
    for record, batch in zip(records, [*batches, batches[0]], strict=True):
        np.testing.assert_array_equal(record.ids, batch)
    assert [record.step for record in records] == [0, 0, 1]
    assert dropped(megatron.read(tmp_path / "a.jsonl", ImportOptions())) == {megatron.MTP_ROWS.kind: 2}


def test_layers_in_any_order(tmp_path: Path) -> None:
    """A rank may write its last layer first; a record's layers rise, and its place is the first of its lines."""
    ids = routes(4, 3, 2, 70_000, "int32")
    ids[2, 1] = -1
    rows = [row(ids[:, place], layer) for place, layer in ((2, 5), (0, 1), (1, 2))]
    (tmp_path / "a.jsonl").write_bytes("".join(json.dumps(each) + "\r\n" for each in rows).encode())
    (record,) = read(tmp_path / "a.jsonl")
    np.testing.assert_array_equal(record.ids, ids)
    assert (record.layers, record.where) == ((1, 2, 5), "line 1, step 0")


def test_multi_token_prediction_is_told_by_either_key(tmp_path: Path) -> None:
    ids = routes(4, 1, 2, 8, "int32")[:, 0]
    rows = [row(ids, 0), row(ids, 0, mtp_idx=0), row(ids, 0, block="mtp"), row(ids, 0, step=1, mtp_idx=None)]
    assert [record.step for record in read(json_lines(tmp_path / "a.jsonl", rows))] == [0, 1]


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    ids = routes(4, 1, 2, 8, "int32")[:, 0]

    def message(*rows: Any) -> str:
        path = json_lines(tmp_path / "a.jsonl", rows)
        with pytest.raises(InputError) as caught:
            kept(megatron.read(path, ImportOptions()))
        return str(caught.value)

    twice = message(row(ids, 0), row(ids, 1), row(ids, 0))
    assert twice.startswith("line 1, step 0: layer 0 is there 2 times, layer 1 1 times")
    short = message(row(ids, 0), row(ids[:3], 1))
    assert short == "line 2: layer 1 has 3 tokens, top-2; layer 0 of the same micro-batch has 4, top-2"
    wide = message(row(ids, 0), row(routes(4, 1, 3, 8, "int32")[:, 0], 1))
    assert "layer 1 has 4 tokens, top-3" in wide
    assert "num_tokens is 4 and topk 3; top_indices is [4, 2]" in message(row(ids, 0) | {"topk": 3})
    assert "layer should be a whole number" in message(row(ids, True))
    assert "line 2: step 1 comes after step 2" in message(row(ids, 0, 2), row(ids, 0, 1))
    assert "line 1: num_tokens is 4 and topk 2; top_indices is [3, 2]" in message(
        row(ids, 0) | {"top_indices": [[0, 1]] * 3}
    )
    assert "there is true or false" in message(row(ids, 0) | {"top_indices": [[True, 1]] * 4})
    assert "there is a number" in message(row(ids, 0) | {"top_indices": [[1.0, 1]] * 4})
    assert "lists 2 deep" in message(row(ids, 0) | {"top_indices": [7] * 4})
    assert "step should be a whole number" in message(row(ids, 0, -1))
    assert message({"top_indices": [], "topk": 2}) == "line 1: no layer"
    assert message([1]) == "item 1: a whole number; expected an object with top_indices"
    assert message(row(ids, 0, block="mtp")) == "no row of a decoder layer"
    for key in ("layer", "top_indices"):
        assert not megatron.recognise(json_lines(tmp_path / "b.jsonl", [{key: row(ids, 0)[key]}]))


def test_ids_parsed_separately_equal_those_of_json() -> None:
    """For any text the fast parser returns the ids of JSON, or none."""
    texts = [b"[[1, 2], [30, 4]]}\n", b"[[-1,7],[0,32768]]} \r\n", b"[[123456789]]}\n"]
    taken = 0
    rng = random.Random(0)
    for text in texts:
        for mutant in [text, *(damaged(text, rng) for _ in range(600))]:
            ids = megatron.ids_at_end(mutant.replace(b"\n", b"") + b"\n")
            if ids is not None:
                assert json.loads(b'{"a":' + mutant.replace(b"\n", b"")) == {"a": ids.tolist()}
                taken += 1
    assert taken > 30
    for values, dtype in (([[1, 2]], "int16"), ([[-32768], [32767]], "int16"), ([[-1, 32768]], "int32")):
        ids = megatron.ids_at_end(json.dumps(values).encode() + b"}\n")
        assert ids is not None
        assert (ids.tolist(), ids.dtype.name) == (values, dtype)
    for text in (b"[ [1 ,2] , [ 3,4]\t]}", b"[[01]]}", b"[[1], [2, 3]]}", b"[[1.0]]}", b"[]}", b"[[1]], 2}"):
        assert megatron.ids_at_end(text + b"\n") is None


def test_keys_in_another_order(tmp_path: Path) -> None:
    """If ids are not at the end of a line, the whole line is parsed as JSON."""
    ids = routes(4, 2, 2, 8, "int32")
    rows = [dict(reversed(row(ids[:, layer], layer).items())) for layer in range(2)]
    (record,) = read(json_lines(tmp_path / "a.jsonl", rows))
    np.testing.assert_array_equal(record.ids, ids)
    (tmp_path / "b.json").write_text("\ufeff" + json.dumps(rows), encoding="utf-8")
    (record,) = read(tmp_path / "b.json")
    np.testing.assert_array_equal(record.ids, ids)
