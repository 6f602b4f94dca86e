"""Conversion of records equals a plain loop, for every layout of layers and padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab import InputError, RoutingTrace
from trimtab.trace import hash_tokens, id_dtype, no_route
from trimtab.trace.formats.normalise import Summary, normalise
from trimtab.trace.formats.records import Dropped, ImportOptions, Record

Array = np.ndarray[Any, Any]
EIGHT = ImportOptions(8)
GOOD = np.array([[[1, 2], [3, 4]], [[5, 6], [7, 0]]])


def random_ids(rng: np.random.Generator, tokens: int, layers: int, num_experts: int, top_k: int) -> Array:
    return np.argsort(rng.random((tokens, layers, num_experts)), axis=-1)[:, :, :top_k]


def joined(records: Sequence[Record | Dropped], known: ImportOptions, summary: Summary | None = None) -> RoutingTrace:
    return RoutingTrace.concatenate(list(normalise(records, known, summary or Summary())))


def is_route(ids: list[int], num_experts: int) -> bool:
    """K >= 2 equal ids are none, whatever they are; nor is a lone -1, 255 or 65535 that is no expert."""
    if len(ids) > 1:
        return len(set(ids)) > 1
    return ids[0] not in (-1, 255, 65535) or 0 <= ids[0] < num_experts


def plain_rows(record: Record, moe: list[int], num_experts: int) -> list[list[list[int]]]:
    """The same by loops over Python numbers."""
    nothing = [no_route(num_experts)] * record.ids.shape[2]
    tokens = record.first + len(record.ids) if record.num_tokens is None else record.num_tokens - 1
    rows = []
    for token in range(tokens):
        row = token - record.first
        if not 0 <= row < len(record.ids):
            rows.append([nothing for _ in moe])
            continue
        of_layer = []
        for layer in moe:
            ids = [int(expert) for expert in record.ids[row, layer]]
            of_layer.append(ids if is_route(ids, num_experts) else nothing)
        rows.append(of_layer)
    return rows


@settings(max_examples=150)
@given(
    num_experts=st.sampled_from([2, 8, 127, 255, 256, 257, 384]),
    top_k=st.integers(1, 3),
    fills=st.lists(st.sampled_from([0, -1, 255, 65535, 1]), max_size=3),
    axis=st.sampled_from(["absolute", "moe only", "named", "from the config"]),
    dtype=st.sampled_from([np.int16, np.int32, np.int64, np.uint16, np.uint64]),
    seed=st.integers(0, 999),
)
def test_conversion_equals_plain_loops(
    num_experts: int, top_k: int, fills: list[int], axis: str, dtype: type, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    top_k = min(top_k, num_experts)
    if (top_k == 1 and axis == "absolute") or (top_k == num_experts == 2 and axis == "absolute"):
        top_k, num_experts = 2, max(num_experts, 3)
    if -1 in fills or 65535 in fills:
        dtype = np.int32
    moe = [1, 3] if axis in ("absolute", "from the config") else [0, 1]
    records = []
    for index in range(int(rng.integers(1, 5))):
        tokens = int(rng.integers(1, 9))
        ids: Array = random_ids(rng, tokens, 4 if len(moe) and moe[0] else 2, num_experts, top_k).astype(dtype)
        if moe[0]:
            ids[:, [0, 2]] = 0
        if top_k == 1 and axis == "moe only":
            ids[0] = 1
        for fill in fills if top_k > 1 else [fill for fill in fills if not 0 <= fill < num_experts]:
            ids[rng.random(tokens) < 0.2] = fill
            ids[rng.random((tokens, ids.shape[1])) < 0.1] = fill
        first = int(rng.integers(0, 3))
        length = [None, first + tokens, first + tokens + 1, first + tokens + 4][int(rng.integers(0, 4))]
        records.append(
            Record(
                ids, f"record {index}", first=first, num_tokens=length,
                prompt_length=int(rng.integers(0, 12)), tokens=(rng.integers(0, 50, length or 5),) if index % 2 else (),
                step=[0, 3][index % 2], domain=["", "code"][index % 2], layers=(5, 9) if axis == "named" else None,
            )
        )  # fmt: skip
    # The first record decides which layers have experts: it should have a route in each.
    ids = records[0].ids
    ids[0, moe] = np.arange(1, top_k + 1) % num_experts
    known = ImportOptions(num_experts, step=7, domain="maths")
    if axis == "from the config":
        known = replace(known, num_layers=4, moe_layers=(1, 3))
    summary = Summary()
    trace = joined(records, known, summary)
    expected = [plain_rows(record, moe, num_experts) for record in records]
    assert trace.expert_ids.dtype == id_dtype(num_experts)
    assert [trace.sequence(index).tolist() for index in range(trace.num_sequences)] == expected
    assert trace.layer_indices.tolist() == ([5, 9] if axis == "named" else moe)
    assert trace.steps.tolist() == [record.step or 7 for record in records]
    assert trace.domains.tolist() == [record.domain or "maths" for record in records]
    hashes = [0 if record.token_ids is None else hash_tokens(record.token_ids) for record in records]
    assert trace.sequence_hashes.tolist() == hashes
    lengths = [len(rows) for rows in expected]
    assert trace.prompt_lengths.tolist() == [min(r.prompt_length, n) for r, n in zip(records, lengths, strict=True)]
    routes = trace.expert_ids[:, :, 0] == trace.no_route
    assert (summary.sequences, summary.tokens) == (len(records), sum(lengths))
    assert (summary.unknown_routes, summary.unknown_rows) == (int(routes.sum()), int(routes.all(axis=1).sum()))
    listed = [
        ids[layer]
        for record in records
        for ids in record.ids[: None if record.num_tokens is None else max(record.num_tokens - 1 - record.first, 0)]
        for layer in moe
    ]
    without = [int(ids[0]) for ids in listed if not is_route(ids.tolist(), num_experts)]
    assert summary.fills == Counter(fill if fill in (-1, 0, 255, 65535) else None for fill in without)
    trace.check()


def test_tokens_and_layers_keep_their_places() -> None:
    """Four decoder layers, of which 1 and 3 have experts. A prompt of two tokens was cached, and nothing is known of
    tokens 4 and 5; the last of 7 tokens is never fed."""
    ids = np.zeros((2, 4, 2), np.int16)
    ids[:, 1], ids[:, 3] = [[1, 2], [3, 4]], [[5, 6], [0, 0]]
    tokens = np.array([10, 11, 12, 13, 14, 15, 16])
    record = Record(ids, "a", first=2, num_tokens=7, tokens=(tokens,))
    none = [255, 255]
    expected = [[none, none], [none, none], [[1, 2], [5, 6]], [[3, 4], none], [none, none], [none, none]]
    for known in (EIGHT, ImportOptions(8, num_layers=4, moe_layers=(1, 3))):
        summary = Summary()
        trace = joined([record], known, summary)
        assert trace.expert_ids.tolist() == expected
        assert trace.layer_indices.tolist() == [1, 3]
        assert (summary.tokens, summary.unknown_rows, summary.unknown_routes) == (6, 4, 9)
        assert trace.sequence_hashes.tolist() == [hash_tokens(tokens)]
    # Without a number of tokens all rows are of tokens that were fed; with one, the last may have a row too many.
    assert joined([replace(record, num_tokens=None)], EIGHT).expert_ids.tolist() == expected[:4]
    assert joined([replace(record, num_tokens=4)], EIGHT).expert_ids.tolist() == expected[:3]


def test_dropped_data_is_counted() -> None:
    rng = np.random.default_rng(0)
    ids = random_ids(rng, 6, 3, 8, 2)
    ids[:, 0] = 0
    summary = Summary()
    padding = [Dropped("padding rows", count) for count in (5, 0, 2)]
    joined([padding[0], Record(ids, "a", num_tokens=6), *padding[1:], Record(ids, "b")], EIGHT, summary)
    last, dense = "rows of last tokens, which are never fed", "layers without experts"
    assert summary.dropped == {"padding rows": 7, last: 1, dense: 1}


def test_the_first_record_with_routes_decides_the_layers() -> None:
    rng = np.random.default_rng(0)
    ids = random_ids(rng, 3, 2, 8, 2)
    trace = joined([Record(np.zeros_like(ids), "a"), Record(ids, "b")], EIGHT)
    assert np.array_equal(trace.sequence(0), np.full((3, 2, 2), 255))
    assert np.array_equal(trace.sequence(1), ids)


def test_prompt_lengths_and_labels_are_limited() -> None:
    records = [Record(GOOD, "a", prompt_length=-3, domain=" one\nline" + "x" * 100), Record(GOOD, "b", prompt_length=9)]
    trace = joined(records, ImportOptions(8, model="red \x1b[31m"))
    assert trace.model == "red  [31m"
    assert trace.prompt_lengths.tolist() == [0, 2]
    assert trace.domains.tolist() == ["one line" + "x" * 71, ""]


def test_expert_0_alone_is_a_route_in_top_1() -> None:
    """A lone 0 is an expert, where the layer is known to have some."""
    ids = np.array([[[0], [0]], [[3], [0]]])
    trace = joined([Record(ids, "a")], ImportOptions(8, moe_layers=(1, 2)))
    assert trace.expert_ids.tolist() == ids.tolist()
    with pytest.raises(InputError, match="layer 1, which may have no experts"):
        joined([Record(ids, "a")], EIGHT)
    # Layers whose ids are -1 have none.
    gaps = np.concatenate([ids * 0 - 1, ids + 1], axis=1)
    assert joined([Record(gaps, "a")], ImportOptions(8, num_layers=4, moe_layers=(2, 3))).num_layers == 2


def test_parts_have_the_size_of_a_row_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.trace.formats.normalise.ROW_GROUP_BYTES", 100)
    ids = random_ids(np.random.default_rng(0), 4, 2, 8, 2)
    parts = list(normalise([Record(ids, str(index)) for index in range(20)], EIGHT, Summary()))
    assert [part.num_sequences for part in parts] == [7, 7, 6]


def good(**facts: Any) -> Record:
    return Record(GOOD, "x", **facts)


def changed(token: int, layer: int, row: list[int], dtype: Any = np.int64, **facts: Any) -> Record:
    ids = GOOD.astype(dtype)
    ids[token, layer] = row
    return Record(ids, "x", **facts)


@pytest.mark.parametrize(
    ("record", "known", "message"),
    [
        (changed(1, 1, [5, 8], first=4), EIGHT, r"x, token 5, layer 1: expert ids \[5, 8\].*0 to 7"),
        (changed(1, 1, [5, 8], layers=(3, 9)), EIGHT, "token 1, layer 9: expert ids"),
        (changed(0, 1, [-(1 << 32) + 1, 0]), EIGHT, "0 to 7"),
        (changed(0, 1, [(1 << 32) - 1, 1], np.uint32), EIGHT, "0 to 7"),
        (changed(0, 1, [-1, 8]), EIGHT, r"layer 1: expert ids \[-1, 8\]"),
        (changed(0, 1, [1 << 40, 0]), EIGHT, "0 to 7"),
        (Record(np.tile([5, 6, 5], (2, 2, 1)), "x"), EIGHT, "x, token 0, layer 0: .*twice"),
        (Record(np.zeros((8, 1025, 2), int), "x"), EIGHT, r"1025 layers; is it \[layers, tokens, top_k\]"),
        (Record(GOOD.astype(float), "x"), EIGHT, "integers"),
        (Record(GOOD.astype(bool), "x"), EIGHT, "integers"),
        (Record(GOOD[0], "x"), EIGHT, "shape"),
        (Record(GOOD[:, :, :0], "x"), EIGHT, "shape"),
        (Record(np.zeros((1, 1, 257), np.int32), "x"), ImportOptions(300), "top-257 routing; .* top-256 at most"),
        (Record(GOOD[:, :, :1] * 0, "x"), EIGHT, "layer 0, which may have no experts at all; give --model"),
        (Record(GOOD * 0, "x"), EIGHT, "no sequence has a route"),
        (good(), ImportOptions(), r"largest id: 7.*--num-experts"),
        (good(), ImportOptions(1), "top-2 routing; there are 1 experts"),
        (good(), ImportOptions(8, top_k=4), "top-2 routing; it should be top-4"),
        (good(), ImportOptions(8, num_layers=3), "2 layers; it should have 3"),
        (good(), ImportOptions(8, num_layers=5, moe_layers=(1,)), "2 layers; the model has 5, 1 of them"),
        (good(), ImportOptions(8, num_layers=6, moe_layers=(0, 1, 5)), "2 layers; the model has 6, 3 of them"),
        (good(), ImportOptions(8, moe_layers=(2,)), "2 layers; the model has None, 1 of them"),
        (good(num_tokens=1), EIGHT, "2 rows of expert ids for 1 tokens"),
        (good(num_tokens=1 << 40), EIGHT, r"more than 1048576 .* \(2 rows for 1099511627776 tokens"),
        (good(first=-1), EIGHT, "tokens count from 0"),
        (good(first=1 << 40), EIGHT, "2 rows"),
        (good(step=1 << 31), EIGHT, "step 2147483648; it should be 0 to"),
        (good(step=1 << 40), EIGHT, "step"),
    ],
)
def test_bad_records_are_refused(record: Record, known: ImportOptions, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        joined([record], known)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("top_k", "unknown"), [(2, [0, 1, 3]), (1, [1])])
def test_both_fills_in_one_record(top_k: int, unknown: list[int]) -> None:
    """SGLang masks padded rows of CUDA graphs with -1; rows of its host buffer that were never written are 0."""
    ids = np.array([[[0, 0]], [[-1, -1]], [[5, 6]], [[0, 0]], [[3, 0]]], np.int32)[:, :, :top_k]
    trace = joined([Record(ids, "a")], ImportOptions(8, moe_layers=(0,)))
    assert np.flatnonzero((trace.expert_ids == trace.no_route).all(axis=(1, 2))).tolist() == unknown
    for row in ([0, -1], [-1, 0]):
        if top_k == 2:
            ids[1, 0] = row
            with pytest.raises(InputError, match="token 1, layer 0"):
                joined([Record(ids, "a")], ImportOptions(8, moe_layers=(0,)))


def test_rows_for_a_part_of_the_tokens_are_placed_or_refused() -> None:
    """SGLang's `routed_experts_start_len` and vLLM's `routed_experts_prompt_start` leave out the first rows."""
    part = good(num_tokens=5, placed=False)
    with pytest.raises(InputError, match=r"^x: 2 rows of expert ids for 5 tokens; 4 are expected, .* --rows-at end if"):
        joined([part], EIGHT)
    for known, first in ((ImportOptions(8, rows_at="start"), 0), (ImportOptions(8, rows_at="end"), 2)):
        trace = joined([part], known)
        np.testing.assert_array_equal(trace.expert_ids[first : first + 2], GOOD)
        assert (np.delete(trace.expert_ids, slice(first, first + 2), axis=0) == trace.no_route).all()
        for tokens in (None, 2, 3):  # the last token may have a row or not
            whole = joined([replace(part, num_tokens=tokens)], known)
            np.testing.assert_array_equal(whole.expert_ids, GOOD[: len(whole.expert_ids)])


def test_records_of_different_models_are_refused() -> None:
    with pytest.raises(InputError, match="no sequences"):
        joined([], EIGHT)
    with pytest.raises(InputError, match=r"b: it has 1 layers, .*, but a has .*: they are of different models"):
        joined([Record(GOOD, "a"), Record(GOOD[:, :1], "b")], EIGHT)
    with pytest.raises(InputError, match="different models"):
        joined([Record(GOOD, "a", layers=(1, 2)), Record(GOOD, "b", layers=(1, 3))], EIGHT)


def test_a_route_in_a_layer_without_experts_is_refused() -> None:
    dense = np.concatenate([GOOD * 0, GOOD], axis=1)
    again = dense.copy()
    again[1, 1] = [3, 1]
    with pytest.raises(InputError, match=r"b, token 1, layer 1: expert ids \[3, 1\]; this layer has no experts"):
        joined([Record(dense, "a"), Record(again, "b")], EIGHT)
    with pytest.raises(InputError, match=r"layer 0.*no experts"):
        joined([Record(GOOD[:, :, :1], "a")], ImportOptions(8, num_layers=2, moe_layers=(1,)))


def test_layers_that_nobody_recorded_are_named() -> None:
    """slime with a pipeline stage whose routes were not captured: zeros in its layers."""
    ids = random_ids(np.random.default_rng(0), 5, 4, 8, 2)
    ids[:, 2:] = 0
    summary = Summary()
    trace = joined([Record(ids, "a"), Record(ids, "b")], ImportOptions(8, moe_layers=(3, 4, 5, 6)), summary)
    assert (trace.expert_ids[:, 2:] == trace.no_route).all()
    assert summary.fills == {0: 20}
    assert len(summary.notes) == 1
    assert "layers 5, 6" in summary.notes[0]
