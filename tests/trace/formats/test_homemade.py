"""Files that people write by themselves: what is one model's is read, everything else is refused."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab import ImportOptions, InputError, import_dump
from trimtab.trace.formats import counts as reader
from trimtab.trace.formats import homemade
from trimtab.trace.formats.counts import MOST_TOKENS, records_of_counts
from trimtab.trace.formats.records import Record

Array = np.ndarray[Any, Any]
EXPERTS, TOP_K = 16, 2


def routes(tokens: int, seed: int, layers: int = 3) -> Array:
    return np.argsort(np.random.default_rng(seed).random((tokens, layers, EXPERTS)))[..., :TOP_K].astype(np.uint8)


def imported(path: Path, value: Any, **options: Any) -> Array:
    path.write_bytes(pickle.dumps(value))
    return import_dump(path, num_experts=EXPERTS, limits=False, **options).expert_ids


def row(request: Any, token: int, layer: int, ids: Sequence[int]) -> str:
    return json.dumps(
        {"rid": request, "position": token, "layer_id": layer, "experts": list(ids), "weights": [0.5, 0.5]}
    )


def test_arrays_in_anything(tmp_path: Path) -> None:
    one, other = routes(5, 0), routes(4, 1)
    both = np.concatenate([one, other])
    mixed = {"tokens": np.arange(9), "routes": [{"ids": one, "score": 0.5}, {"ids": other}], "loss": np.ones((4, 3, 2))}
    for value in (mixed, [[one], [other]], {"a": np.asfortranarray(one), "b": other.astype(">i4")}):
        assert np.array_equal(imported(tmp_path / "a", value), both)
    padded = np.full((2, 7, 3, TOP_K), 255, np.uint8)
    padded[0, :5], padded[1, 2:6] = one, other
    assert np.array_equal(imported(tmp_path / "a", padded), both)
    flat = [one.reshape(5, -1), other.reshape(4, -1)]
    assert np.array_equal(imported(tmp_path / "a", flat, num_layers=3, top_k=TOP_K), both)


@pytest.mark.parametrize(
    "value",
    [
        [routes(5, 0), routes(5, 0, layers=4)],
        {"a": 1},
        [],
        "text",
        [[[[[[routes(5, 0)]]]]]],
        np.zeros((4, 300, 2), int),
    ],
)
def test_other_values_are_of_no_format(value: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"looks like none of .*numpy\.savez"):
        imported(tmp_path / "a", value)


@settings(max_examples=40)
@given(st.integers(0, 999))
def test_rows_in_any_order(seed: int) -> None:
    """Requests beside each other, tokens that begin anywhere, layers that are any."""
    rng = np.random.default_rng(seed)
    layers = sorted(rng.choice(60, 3, replace=False).tolist())
    firsts, ids = rng.integers(0, 5, 3).tolist(), [routes(int(rng.integers(1, 6)), seed + at) for at in range(3)]
    lines = [
        row(f"r{at}", first + token, layers[layer], each[token, layer].tolist())
        for at, (first, each) in enumerate(zip(firsts, ids, strict=True))
        for token, layer in np.ndindex(*each.shape[:2])
    ]
    lost = int(rng.integers(0, len(lines)))
    kept = [lines[place] for place in rng.permutation(len(lines)).tolist() if place != lost or len(ids[0]) == 1]
    path = Path(tempfile.mkstemp()[1])
    path.write_text("\n".join(['{"type": "begin"}', *kept]))
    try:
        found = {each.where: each for each in homemade.read(path, ImportOptions()) if isinstance(each, Record)}
    finally:
        path.unlink()
    place = 0
    for at, (first, each) in enumerate(zip(firsts, ids, strict=True)):
        expected = each.astype(np.int32)
        for token, layer in np.ndindex(*each.shape[:2]):
            if place == lost and len(ids[0]) > 1:
                expected[token, layer] = -1
            place += 1
        record = found[f"request r{at}"]
        without = (expected == -1).all(axis=(1, 2))
        assert record.layers == tuple(layers)
        assert np.array_equal(record.ids, expected[: len(record.ids)])
        assert (record.first, without[len(record.ids) :].all()) == (first, True)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([row("a", 0, 0, [1, 2]), row("a", 0, 0, [1, 2])], "request a: token 0, layer 0 is there 2 times"),
        ([row(None, 0, 0, [1, 2]), row(None, 0, 0, [3, 4])], "all lines: .* a key 'req_id' tells sequences apart"),
        ([row("a", 0, 0, [1, 2]), row("a", 1, 0, [1, 2, 3])], "line 2: 3 ids; there are 2"),
        ([row("a", 0, 0, [1, 2]), row("a", 99999, 0, [1, 2])], "is the token its place in the sequence"),
        ([row("a", 0, 0, [1, 2]), row("a", -1, 0, [1, 2])], "request a: token -1"),
        (
            [row("a", 0, 0, [1, 2]), row("a", 1 << 40, 0, [1, 2])],
            r"line 2: token, layer and ids \(1099511627776, 0, 1, 2\)",
        ),
    ],
)
def test_rows_that_are_none_are_refused(lines: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match=message):
        import_dump(tmp_path / "a.jsonl", num_experts=EXPERTS, limits=False)


@settings(max_examples=60)
@given(st.integers(1, 8), st.integers(8, 20), st.floats(0.1, 3e6), st.integers(0, 1 << 30))
def test_any_counts_are_kept_in_proportion(top_k: int, experts: int, size: float, seed: int) -> None:
    counts = (size * np.random.default_rng(seed).random((1, 2, experts))).astype(np.int64)
    totals = counts.sum(axis=2)
    if not totals.any() or (counts.max(axis=2) > totals // top_k).any():
        return
    records = [item for item in records_of_counts(counts, [0], ImportOptions(top_k=top_k)) if isinstance(item, Record)]
    (record,) = records
    assert record.layers is not None
    assert len(record.ids) <= MOST_TOKENS
    for place, layer in enumerate(record.layers):
        ids = record.ids[:, place][record.ids[:, place, 0] >= 0]
        assert all(len(set(each)) == top_k for each in ids[:50].tolist())
        exact = counts[0, layer] * (ids.size / totals[0, layer])
        assert np.abs(np.bincount(ids.ravel(), minlength=experts) - exact).max() < 1
        assert abs(len(ids) - totals[0, layer] / top_k * min(1, MOST_TOKENS / (totals.max() // top_k))) <= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer,expert,count\n", "no counts below its first line"),
        ("layer,expert,count\n0,1,-4\n", "line 2: '0, 1, -4'; they should be whole numbers"),
        ("layer,expert,count\n0,1\n", "line 2"),
        ("layer,expert,count\n0,99999999,4\n", "are the columns swapped"),
        ("layer,expert,count\n0,1,4\n", "give the model's top_k"),
        ("layer,layer2,expert,count\n0,0,1,4\n", "looks like none of"),
        ("token_idx,layer,expert\n0,0,1\n", "looks like none of"),
        ("layer,expert,token_id\n0,1,4\n", "looks like none of"),
    ],
)
def test_counts_that_are_none_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        import_dump(tmp_path / "a.csv", limits=False)


def test_counts_of_the_moe_layers_alone(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(50, 99, (3, EXPERTS))
    np.save(tmp_path / "a.npy", counts)
    options = ImportOptions(top_k=2, moe_layers=(1, 4, 6))
    records = [item for item in reader.read(tmp_path / "a.npy", options) if isinstance(item, Record)]
    assert [record.layers for record in records] == [(1, 4, 6)]
    assert reader.read_metadata(tmp_path / "a.npy").num_experts == EXPERTS
    trace = import_dump(tmp_path / "a.npy", format="counts", num_experts=EXPERTS, top_k=2, limits=False)
    assert not any("repeat" in note for note in trace.notes)
    halves = [np.bincount(half[:, 0].ravel(), minlength=256)[:EXPERTS] for half in np.array_split(trace.expert_ids, 2)]
    assert abs(halves[0] - halves[1]).max() < 50
