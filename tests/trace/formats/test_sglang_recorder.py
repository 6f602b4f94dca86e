"""Dumps of SGLang's recorder in its modes: logical ids, and tokens with the recorded counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.import_items import dropped, kept
from helpers.pickled_dumps import routes
from trimtab import InputError
from trimtab.trace.formats import sglang_recorder
from trimtab.trace.formats.importing import format_of
from trimtab.trace.formats.records import ImportOptions, Record

LAYERS, TOP_K, EXPERTS, PHYSICAL = 5, 4, 16, 20
MOE_LAYERS = (1, 2, 3, 4)
EXTEND, DECODE, IDLE = 1, 2, 4
Expected = list[tuple[str, Any, str]]


def per_token(named: bool = False) -> tuple[dict[str, Any], Expected]:
    """Two requests: prefill of both, an empty pass, two passes of decoding the second of which is padded.

    Returns the dump, and by sequence its name, its logical ids, and its domain.
    """
    rng = np.random.default_rng(0)
    # Experts 0 to 3 have two copies each, elsewhere in every layer.
    physical_to_logical = np.stack([rng.permutation(np.r_[np.arange(EXPERTS), np.arange(4)]) for _ in range(LAYERS)])
    records, expected = [], []
    plan = [(10, EXTEND, [5, 2], 7), (11, IDLE, None, 0), (12, DECODE, None, 2), (13, DECODE, None, 2)]
    parts: dict[str, list[Any]] = {"request a": [], "request b": []}
    for number, mode, lengths, tokens in plan:
        logical = routes(rng, tokens, len(MOE_LAYERS), TOP_K, EXPERTS)
        physical = np.full((LAYERS, tokens, 8), -1, np.int32)
        for place, layer in enumerate(MOE_LAYERS):
            for token in range(tokens):
                for k in range(TOP_K):
                    copies = np.flatnonzero(physical_to_logical[layer] == logical[token, place, k])
                    physical[layer, token, k] = rng.choice(copies)
        if number == 13:
            physical[:, 1], logical[1] = -1, -1
        record = {
            "forward_pass_id": number, "rank": 0, "gatherer_key": "primary", "forward_mode": mode, "misc_objects": [],
            "input_ids": rng.integers(0, 100, tokens).tolist(), "positions": list(range(tokens)),
            "extend_seq_lens": lengths, "topk_ids_of_layer": torch.from_numpy(physical),
            "global_physical_count": torch.zeros((LAYERS, PHYSICAL), dtype=torch.int32),
        }  # fmt: skip
        if named:
            record["rids"] = ["a", "b"][:tokens]
        records.append(record)
        if mode == EXTEND:
            expected += [(f"forward pass {number}, piece 0", logical[:5], "prefill")]
            expected += [(f"forward pass {number}, piece 1", logical[5:], "prefill")]
            parts["request a"].append(logical[:5])
            parts["request b"].append(logical[5:])
        elif mode == DECODE:
            expected += [(f"forward pass {number}, piece 0", logical, "decode")]
            parts["request a"].append(logical[:1])
            parts["request b"].append(logical[1:])
    if named:
        expected = [(name, np.concatenate(pieces), "") for name, pieces in parts.items()]
    dump = {"records": records, "last_physical_to_logical_map": torch.from_numpy(physical_to_logical)}
    return dump, expected


def records_of(dump: Any, top_k: int | None = None) -> list[Record]:
    return kept(sglang_recorder.records_of_dump(dump, ImportOptions(top_k=top_k)))


@pytest.mark.parametrize("named", [False, True])
def test_tokens_by_request(tmp_path: Path, named: bool) -> None:
    dump, expected = per_token(named)
    torch.save(dump, tmp_path / "a.pt")
    assert format_of(tmp_path / "a.pt") == "sglang-recorder"
    records = kept(sglang_recorder.read(tmp_path / "a.pt", ImportOptions()))
    assert [(record.where, record.domain) for record in records] == [(name, domain) for name, _, domain in expected]
    for record, (_, ids, domain) in zip(records, expected, strict=True):
        assert np.array_equal(record.ids, ids)
        assert record.layers == MOE_LAYERS
        assert record.prompt_length == (len(ids) if domain == "prefill" else 0 if domain else len(ids) - 2)
    assert dropped(sglang_recorder.read(tmp_path / "a.pt", ImportOptions())) == {"empty forward passes": 1}


def test_inconsistent_lengths_are_ignored() -> None:
    """Then a pass is one piece, and those of passes with the same number are told apart."""
    dump, _ = per_token()
    first = dump["records"][0] | {"extend_seq_lens": [5, 3]}
    records = records_of(dump | {"records": [first, first]})
    assert [record.where for record in records] == ["forward pass 10, piece 0", "forward pass 10, piece 0'"]
    assert [(len(record.ids), record.prompt_length) for record in records] == [(7, 7), (7, 7)]


def test_ids_without_a_map_are_logical() -> None:
    dump, _ = per_token()
    del dump["last_physical_to_logical_map"]
    record = records_of(dump)[0]
    assert np.array_equal(record.ids, dump["records"][0]["topk_ids_of_layer"][1:, :5, :TOP_K].permute(1, 0, 2))


def counts_of(ids_TLK: Any, experts: int) -> Any:
    """`[layers, experts]`, one id after another."""
    counts = np.zeros((ids_TLK.shape[1], experts), np.int64)
    for token in ids_TLK:
        for layer, row in enumerate(token):
            for expert in row:
                counts[layer, expert] += expert >= 0
    return counts


@settings(max_examples=60)
@given(st.integers(1, 30), st.integers(1, 8), st.integers(8, 20), st.integers(0, 1 << 30))
def test_tokens_generated_from_counts_have_these_counts(tokens: int, top_k: int, experts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    passes = [routes(rng, n, 3, top_k, experts) for n in (tokens, 0, 1)]
    counts = np.stack([counts_of(ids, experts) for ids in passes])
    counts[:, 1] = 0  # a dense layer
    dump = {"rank": 0, "logical_count": torch.from_numpy(counts).int(), "average_utilization_rate_over_window": None}
    items = list(sglang_recorder.records_of_dump(dump, ImportOptions(top_k=top_k)))
    records = kept(items)
    assert [record.where for record in records] == ["forward pass 0", "forward pass 2"]
    for record, place in zip(records, (0, 2), strict=True):
        assert record.ids.shape == (len(passes[place]), 2, top_k)
        assert record.layers == (0, 2)
        assert np.array_equal(counts_of(record.ids, experts), counts[place][[0, 2]])
        assert all(len(set(row)) == top_k for row in record.ids.reshape(-1, top_k).tolist())
    made_up = "tokens whose experts are made up to fit recorded counts"
    assert dropped(items) == {made_up: tokens + 1, "empty forward passes": 1}


def test_layers_with_fewer_counted_tokens_have_unknown_routes() -> None:
    counts = torch.tensor([[[2, 2, 0], [1, 0, 1]]])
    (record,) = records_of({"logical_count": counts}, 2)
    assert np.array_equal(record.ids[:, 0], [[0, 1], [0, 1]])
    assert np.array_equal(record.ids[:, 1], [[0, 2], [-1, -1]])


def test_physical_counts_by_pass(tmp_path: Path) -> None:
    """Mode `per_pass`: two copies of expert 0."""
    records = [{"forward_pass_id": 7, "rank": 0, "global_physical_count": torch.tensor([[1, 2, 2, 1], [0, 3, 2, 1]])}]
    dump = {"records": records, "last_physical_to_logical_map": torch.tensor([[0, 1, 2, 0], [1, 2, 0, 0]])}
    torch.save(dump, tmp_path / "a.pt")
    assert format_of(tmp_path / "a.pt") == "sglang-recorder"
    (record,) = kept(sglang_recorder.read(tmp_path / "a.pt", ImportOptions(top_k=2)))
    assert record.where == "forward pass 7"
    assert np.array_equal(counts_of(record.ids, 3), [[2, 2, 2], [3, 0, 3]])


def test_physical_counts_need_a_map_that_fits() -> None:
    record = {"forward_pass_id": 7, "rank": 0, "global_physical_count": np.array([[1, 2, 2, 1]])}

    def read(logical: list[int]) -> None:
        records_of({"records": [record], "last_physical_to_logical_map": np.array([logical])}, 2)

    read([0, 1, 2, 0])
    with pytest.raises(InputError, match="names expert 9; there are 4 physical ones"):
        read([0, 1, 9, 0])
    for wrong in ([0, 1, 2], [0, 1, -1, 0]):
        with pytest.raises(InputError, match="do not fit together"):
            read(wrong)


@pytest.mark.parametrize(
    ("dump", "top_k", "message"),
    [
        ({"logical_count": np.ones((1, 1, 4), int)}, None, r"counts .* only: give the model's top_k.*per_token"),
        ({"logical_count": np.array([[[1, 0, 3, 1]]])}, 2, "forward pass 0, layer 0: 5 counts.*is top_k right"),
        ({"logical_count": np.array([[[3, 1, 0]]])}, 2, "3 of expert 0 can't come from"),
        ({"logical_count": np.zeros((2, 2, 4), int)}, 2, "all zero"),
        ({"logical_count": np.array([[[-2, 4, 0]]])}, 2, "damaged, it counts"),
        ({"logical_count": np.zeros((0, 2, 4), int)}, 2, "all zero"),
        ({"records": []}, 2, "no token"),
        ({"records": 3}, 2, "neither 'logical_count' nor 'records'"),
        ([1], 2, "should be a dictionary"),
    ],
)
def test_impossible_counts_are_refused(dump: Any, top_k: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        records_of(dump, top_k)


def test_experts_outside_of_the_map_are_refused() -> None:
    dump, _ = per_token()
    dump["last_physical_to_logical_map"] = dump["last_physical_to_logical_map"][:, :10]
    with pytest.raises(InputError, match=r"forward pass 10: a physical expert that is not in .* \[5, 10\]"):
        records_of(dump)
    largest = int(dump["records"][0]["topk_ids_of_layer"].max())
    dump["records"] = dump["records"][:1]
    with pytest.raises(InputError, match="a physical expert that is not in"):
        records_of(dump | {"last_physical_to_logical_map": np.zeros((LAYERS, largest), int)})
    assert len(records_of(dump | {"last_physical_to_logical_map": np.zeros((LAYERS, largest + 1), int)})) == 2
