"""Exported traces are imported unchanged, and have the format that other tools expect."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.import_items import kept
from helpers.response_dumps import routes, safetensors_bytes
from helpers.trace_arrays import write_npz, write_safetensors
from trimtab import InputError, RoutingTrace, import_dump
from trimtab.trace import no_route
from trimtab.trace.exports.megatron import write_megatron
from trimtab.trace.formats import arrays, megatron, vllm
from trimtab.trace.formats.importing import format_of
from trimtab.trace.formats.records import ImportOptions, Record

WRITERS: dict[str, tuple[Any, ModuleType]] = {
    "npz": (write_npz, arrays),
    "safetensors": (write_safetensors, arrays),
    "megatron": (write_megatron, megatron),
}


def some_trace(experts: int = 300, lengths: tuple[int, ...] = (5, 1, 7), top_k: int = 3, seed: int = 0) -> RoutingTrace:
    ids = [routes(length, 2, top_k, experts, "int64", seed=seed + i) for i, length in enumerate(lengths)]
    ids[0][1:2, 1] = no_route(experts)
    return RoutingTrace.from_sequences(
        ids, num_experts=experts, shape=(2, top_k), layer_indices=[1, 4], model="some-moe",
        prompt_lengths=[min(2, length) for length in lengths], steps=[3 + i // 2 for i in range(len(lengths))],
        sequence_hashes=[(1 << 63) + i for i in range(len(lengths))],
        domains=["", "maths, é中", "code"][: len(lengths)] + [""] * (len(lengths) - 3),
    )  # fmt: skip


def back(records: list[Record], experts: int) -> RoutingTrace:
    """A trace of records whose only conversion is that of unknown routes."""
    ids = []
    for record in records:
        fills = [-1, no_route(experts)]
        gaps = (np.isin(record.ids, fills) & (record.ids == record.ids[..., :1])).all(axis=2, keepdims=True)
        assert record.num_tokens is None
        ids.append(np.where(gaps, no_route(experts), record.ids.astype(np.int64)))
    return RoutingTrace.from_sequences(
        ids, num_experts=experts, layer_indices=records[0].layers,
        prompt_lengths=[record.prompt_length for record in records], steps=[record.step for record in records],
        sequence_hashes=[record.sequence_hash for record in records], domains=[record.domain for record in records],
    )  # fmt: skip


def same(trace: RoutingTrace, other: RoutingTrace, but: tuple[str, ...] = ()) -> None:
    for name in {field.name for field in fields(RoutingTrace)} - {
        "num_experts",
        "model",
        "windows",
        "sampled",
        "numbering",
        "notes",
        *but,
    }:
        np.testing.assert_array_equal(getattr(trace, name), getattr(other, name), name)
        assert getattr(trace, name).dtype.kind == getattr(other, name).dtype.kind


@pytest.mark.parametrize("form", WRITERS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    experts=st.sampled_from([1, 16, 255, 256, 257, 384]),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5).map(tuple),
    top_k=st.integers(1, 4),
)
def test_round_trip(tmp_path: Path, form: str, experts: int, lengths: tuple[int, ...], top_k: int) -> None:
    write, reader = WRITERS[form]
    trace = some_trace(experts, lengths, min(top_k, experts))
    path = tmp_path / "export"
    write(trace, path)
    assert [each.recognise(path) for each in (reader, vllm)] == [True, False]
    known = arrays.read_metadata(path) if reader is arrays else ImportOptions()
    if reader is arrays:
        assert (known.num_experts, known.model) == (experts, "some-moe")
    same(trace, back(kept(reader.read(path, known)), experts), ("sequence_hashes",) if form == "megatron" else ())


@pytest.mark.parametrize("spaces", [0, 512, 1024])
def test_a_header_whose_length_looks_like_a_pickle(tmp_path: Path, spaces: int) -> None:
    """Its first bytes are those of a pickle of protocol 3, 4 or 5: the length of the header is 128 + 256 * protocol."""
    trace, path = some_trace(), tmp_path / "a.safetensors"
    write_safetensors(trace, path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    longer = (0x380 + spaces - length) % 0x10000
    assert length <= 0x380
    path.write_bytes(
        (length + longer).to_bytes(8, "little") + content[8 : 8 + length] + b" " * longer + content[8 + length :]
    )
    assert path.read_bytes()[0] == 0x80
    same(trace, back(kept(arrays.read(path, arrays.read_metadata(path))), trace.num_experts))


def test_megatron_rows(tmp_path: Path) -> None:
    """Its own tools look for these keys in every line."""
    trace = some_trace()
    write_megatron(trace, tmp_path / "a.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    expected = [(3, 1, 5), (3, 4, 5), (3, 1, 1), (3, 4, 1), (4, 1, 7), (4, 4, 7)]
    assert [(row["step"], row["layer"], row["num_tokens"]) for row in rows] == expected
    facts = {(row["stage"], row["block"], row["rank"], row["topk"]) for row in rows}
    assert facts == {("pre_dispatch", "decoder", 0, 3)}
    assert rows[1]["top_indices"][1] == [-1, -1, -1]
    assert rows[4]["top_indices"] == trace.sequence(2)[:, 0].tolist()


def test_sequences_of_one_step_stay_apart(tmp_path: Path) -> None:
    """With equal lengths they could be micro-batches of Megatron's."""
    trace = some_trace(lengths=(4, 4, 4))
    write_megatron(trace, tmp_path / "a.jsonl")
    records = kept(megatron.read(tmp_path / "a.jsonl", ImportOptions()))
    assert [record.prompt_length for record in records] == trace.prompt_lengths.tolist()
    assert [record.domain for record in records] == trace.domains.tolist()


def test_texts_in_either_byte_order(tmp_path: Path) -> None:
    for order in "<>":
        domains = np.array(["é\ud7ff", "\ue000\U0010ffff"]).astype(f"{order}U2")
        np.savez(tmp_path / "a.npz", expert_ids=np.ones((2, 1, 1), int), sequence_starts=[0, 1, 2], domains=domains)
        records = kept(arrays.read(tmp_path / "a.npz", ImportOptions()))
        assert [record.domain for record in records] == ["é\ud7ff", "\ue000\U0010ffff"]


def test_only_the_ids_are_needed(tmp_path: Path) -> None:
    ids = routes(4, 2, 3, 16, "int32")
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes({"expert_ids": ("I32", [4, 2, 3], ids.tobytes())}, {}))
    (record,) = kept(arrays.read(path, ImportOptions()))
    np.testing.assert_array_equal(record.ids, ids)
    assert (record.layers, record.step, arrays.read_metadata(path)) == (None, 0, ImportOptions())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sequence_starts": [0, 5, 4, 13]}, "sequence_starts should be ascending"),
        ({"sequence_starts": [0, 5, 6, 14]}, "sequence_starts should be ascending from 0 to the number of tokens, 13"),
        ({"steps": [1, 2, 3, 4]}, "steps should be 3 whole numbers"),
        ({"sequence_hashes": np.array([1, -2, 3])}, "sequence_hashes should be 3 whole numbers of 0 to 18446"),
        ({"layer_indices": [4, 4]}, "layer_indices should be 2 ascending"),
        ({"num_experts": [65536]}, "num_experts should be a number of 1 to 65535"),
        ({"steps": [1, -2, 3]}, "steps should be 3 whole numbers of 0 to 2147483647"),
        ({"prompt_lengths": [1.0, 2.0, 3.0]}, "prompt_lengths is float64; it should be whole numbers"),
        ({"domains": ["a"]}, "domains should be 3 texts"),
        ({"domains": np.full(3, 0x110000, np.uint32).view("<U1")}, "domains holds what is no Unicode text"),
        ({"domains": np.full(3, 0xDFFF, ">u4").view(">U1")}, "domains holds what is no Unicode text"),
        ({"model": np.full(1, 0xFFFFFFFF, np.uint32).view("<U1")}, "model holds what is no Unicode text"),
        ({"num_experts": [0]}, "num_experts should be a number of 1 to 65535"),
        ({"num_experts": 300}, "num_experts should be an array of one value"),
        ({"expert_ids": np.zeros((13, 2), int)}, "expert_ids has shape [5, 2], not [tokens, layers, top_k]; give"),
        ({"expert_ids": np.zeros((13, 2, 3), object)}, "expert_ids: it holds objects; only plain numbers are read"),
        ({"expert_ids": np.zeros((13, 2, 3))}, "ids are float64; they should be integers"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    path = tmp_path / "a.npz"
    write_npz(some_trace(), path)
    with np.load(path) as found:
        content = dict(found)
    np.savez(path, **{**content, **change})
    with pytest.raises(InputError, match=f"^{re.escape(expected)}"):
        kept(arrays.read(path, arrays.read_metadata(path)))


def test_a_pickled_array_without_its_dtype_is_refused(tmp_path: Path) -> None:
    unmade = b"cnumpy.core.multiarray\n_reconstruct\n)R"
    (tmp_path / "a.pkl").write_bytes(b"\x80\x04}\x8c\x0aexpert_ids" + unmade + b"s.")
    with pytest.raises(InputError, match="expert_ids: a damaged file: an array without dtype"):
        kept(arrays.read(tmp_path / "a.pkl", ImportOptions()))


def test_an_array_for_each_sequence(tmp_path: Path) -> None:
    """Under any names; arrays that don't fit together are none."""
    one, other = (np.argsort(np.random.default_rng(seed).random((9 + seed, 3, 16)))[..., :2] for seed in (0, 1))
    np.savez(tmp_path / "a.npz", first=one.astype(np.uint8), second=other.astype(np.uint8))
    trace = import_dump(tmp_path / "a.npz", num_experts=16)
    for index, ids in enumerate((one, other)):
        assert np.array_equal(trace.sequence(index), ids)
    wide = [one.repeat(100, axis=1), other.repeat(100, axis=1)]
    for arrays_ in ([one, other[:, :2]], [one / 2, other / 2], wide):
        np.savez(tmp_path / "b.npz", *arrays_)
        with pytest.raises(InputError, match="looks like none of"):
            import_dump(tmp_path / "b.npz", num_experts=16)
    # A name that another format knows.
    np.savez(tmp_path / "c.npz", logical_count=np.ones((4, 2, 8), int), last=np.ones((4, 2, 8), int))
    assert format_of(tmp_path / "c.npz") == "sglang-recorder"
