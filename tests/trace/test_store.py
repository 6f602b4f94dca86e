"""The Parquet store: traces round-trip, damaged files are refused in one line, and memory reads like a file."""

from __future__ import annotations

import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.traces import odd_trace
from trimtab import InputError, RoutingTrace, TraceReader, read_trace, write_trace
from trimtab.trace import id_dtype, no_route
from trimtab.trace.row_groups import decode, encode
from trimtab.trace.store import MemoryReader, named_files, open_trace


def random_trace(num_experts: int, seed: int = 0) -> RoutingTrace:
    rng = np.random.default_rng(seed)
    lengths = [5, 0, 17, 1]
    sequences = [np.argsort(rng.random((n, 3, num_experts)), axis=-1)[:, :, :4] for n in lengths]
    sequences[2][4] = no_route(num_experts)
    return RoutingTrace.from_sequences(
        sequences, num_experts=num_experts, layer_indices=[1, 2, 5], prompt_lengths=[2, 0, 3, 1], steps=[7, 7, 8, 9],
        sequence_hashes=rng.integers(1, 1 << 63, 4, dtype=np.uint64), domains=["maths", "", "code", "maths"],
        windows=[(), (), ((6, 4), (8, 13)), ((9, 1),)], model="test model",
    )  # fmt: skip


@pytest.mark.parametrize("num_experts", [4, 255, 256, 257])
def test_round_trip(tmp_path: Path, num_experts: int) -> None:
    trace = random_trace(num_experts)
    write_trace(trace, tmp_path / "deep" / "trace.parquet")
    again = read_trace(tmp_path / "deep" / "trace.parquet")
    assert again.expert_ids.dtype == trace.expert_ids.dtype
    assert np.array_equal(again.expert_ids, np.sort(trace.expert_ids, axis=-1))
    for name in (
        "sequence_starts", "prompt_lengths", "steps", "sequence_hashes", "domains", "windows", "layer_indices",
    ):  # fmt: skip
        before, after = getattr(trace, name), getattr(again, name)
        assert before.dtype == after.dtype, name
        assert np.array_equal(before, after), name
    assert (again.num_experts, again.model) == (num_experts, "test model")
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "trace.parquet"]
    write_trace(trace.select([]), tmp_path / "empty.parquet")
    assert read_trace(tmp_path / "empty.parquet").num_sequences == 0


def test_files_of_earlier_versions_have_no_windows(tmp_path: Path) -> None:
    write_trace(random_trace(8), tmp_path / "trace.parquet")
    pq.write_table(pq.read_table(tmp_path / "trace.parquet").drop(["windows"]), tmp_path / "trace.parquet")
    again = read_trace(tmp_path / "trace.parquet")
    assert again.windows.tolist() == [()] * 4
    assert again.row_versions(2).tolist() == [8] * 17


def test_other_parquet_files_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(InputError, match="not a routing trace"):
        read_trace(tmp_path / "other.parquet")


def rewritten(file: Path, header: dict[str, Any] | None = None, **columns: list[Any]) -> None:
    """Other columns or another header in a file that we wrote."""
    table = pq.read_table(file)
    for name, values in columns.items():
        place = table.column_names.index(name)
        field = table.schema.field(name).with_nullable(True)
        table = table.set_column(place, field, pa.array(values, field.type))
    metadata = json.loads(table.schema.metadata[b"trimtab"]) | (header or {})
    pq.write_table(table.replace_schema_metadata({"trimtab": json.dumps(metadata)}), file)


def window(version: int, rows: int) -> dict[str, int]:
    return {"version": version, "rows": rows}


TOKEN = bytes([0, 1, 1, 1] * 3)  # experts 0 to 3 in each of three layers
BEYOND = bytes([0, 8, 1, 1]) + TOKEN[4:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"header": {"format": "trimtab-routing-9"}}, "written in format 'trimtab-routing-9'; this version reads"),
        ({"header": {"top_k": 0}}, "its header should have top_k from 1 to 8, not 0"),
        ({"header": {"top_k": True}}, "its header should have top_k from 1 to 8, not True"),
        ({"header": {"top_k": 2**70}}, "its header should have top_k from 1 to 8, not 1180591620717411303424"),
        ({"header": {"num_experts": -5}}, "its header should have num_experts from 1 to 65535, not -5"),
        ({"header": {"layer_indices": []}}, r"its header should have 1 to 4096 different layer_indices, not \[\]"),
        ({"header": {"layer_indices": [2, 2, 3]}}, "its header should have 1 to 4096 different layer_indices"),
        ({"header": {"layer_indices": {"0": 1}}}, "its header should have 1 to 4096 different layer_indices"),
        ({"header": {"layer_indices": [0, -1, 3]}}, "its header should have a layer index from 0 to 1048575, not -1"),
        ({"header": {"layer_indices": [0, 2**40, 3]}}, "its header should have a layer index from 0 to 1048575, not"),
        ({"header": {"layer_indices": [0, 1.5, 3]}}, "its header should have a layer index .*, not 1.5"),
        ({"header": {"model": "m" * 257}}, "its header should have a model of at most 256 letters, not 'mmm"),
        ({"header": {"model": None}}, "its header should have a model of at most 256 letters, not None"),
        ({"domain": ["", "", "x" * 257, ""]}, "a domain has 257 letters; names have at most 256"),
        ({"domain": ["", "", "x" * 100_000, ""]}, r"the file claims to have row group 0: 10\d+ bytes beside the"),
        ({"step": [0, 0, -1, 0]}, "sequence 2 has step -1; it should be at least 0"),
        ({"prompt_length": [0, -7, 0, 0]}, "sequence 1 has prompt length -7; it should be at least 0"),
        (
            {"num_tokens": [2**31 - 1] * 4, "windows": [[]] * 4},
            "the file claims to have 8589934588 tokens, which is more than a file of its",
        ),
        ({"num_tokens": [5, -1, 17, 1]}, "sequence 1 claims -1 tokens"),
        ({"num_tokens": [17, 0, 5, 1], "windows": [[]] * 4}, "sequence 0 .* holds 60 bytes .* 17 tokens x 3 layers"),
        ({"windows": [[], [], [window(6, 4), window(8, 12)], []]}, r"sequence 2 has 17 .* its windows have \[4, 12\]"),
        ({"windows": [[], [], [window(6, 17), window(8, 0)], []]}, r"sequence 2 has 17 .* its windows have \[17, 0\]"),
        ({"windows": [[], [window(6, 1)], [], []]}, r"sequence 1 has 0 tokens; its windows have \[1\]"),
        ({"windows": [[window(6, 1)] * 20_000, [], [], []]}, "its sequences claim 20003 windows; one has at most 4096"),
        ({"windows": [[None], [], [], []]}, "a value of the column 'windows' is missing"),
        ({"expert_ids": [BEYOND + TOKEN * 4, b"", TOKEN * 17, TOKEN]}, r"row group 0: token 0 in MoE layer 0.*\[0, 8"),
        ({"expert_ids": [TOKEN * 5, b"", TOKEN * 17, bytes(1 << 18)]}, r"row group 0 claims 26\d+ bytes; .* 276 bytes"),
    ],
)
def test_inconsistent_files_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_trace(random_trace(8), tmp_path / "trace.parquet")
    rewritten(tmp_path / "trace.parquet")
    read_trace(tmp_path / "trace.parquet")
    rewritten(tmp_path / "trace.parquet", **change)
    with pytest.raises(InputError, match=rf"trace\.parquet: {message}"):
        read_trace(tmp_path / "trace.parquet")


def test_a_reader_refuses_wrong_windows_when_it_opens(tmp_path: Path) -> None:
    """It has the facts before it reads ids."""
    write_trace(random_trace(8), tmp_path / "trace.parquet")
    rewritten(tmp_path / "trace.parquet", windows=[[], [], [window(6, 4), window(8, 12)], []])
    with pytest.raises(InputError, match=r"trace\.parquet: sequence 2 has 17 .* its windows have \[4, 12\]"):
        TraceReader(tmp_path / "trace.parquet")


def test_hidden_files_in_a_folder_are_ignored(tmp_path: Path) -> None:
    """Such as what another process is still writing."""
    for name in ("b", "a", ".half"):
        (tmp_path / name).touch()
    assert named_files(tmp_path, "*") == [tmp_path / "a", tmp_path / "b"]


def test_a_file_given_twice_is_noted_and_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By its name, in its folder, by another path or a link."""
    caplog.set_level(logging.INFO, "trimtab")
    file = tmp_path / "t.parquet"
    write_trace(odd_trace(3), file)
    (tmp_path / "latest.parquet").symlink_to(file)
    beside = tmp_path / ".." / tmp_path.name / "t.parquet"
    for _ in range(2):
        assert same(read_trace([file, file, beside, tmp_path]), read_trace(file))
    note = f"given twice, and read once: {file}, {beside}, {tmp_path / 'latest.parquet'} and 1 more"
    assert caplog.messages == [note]


def test_damaged_files_are_refused_or_read_whole(tmp_path: Path) -> None:
    """Cut anywhere, or any byte flipped: an InputError of one line that names the file, or an intact trace."""
    file = tmp_path / "trace.parquet"
    write_trace(random_trace(8), file)
    data = file.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    damaged = [data[:cut] for cut in rng.integers(0, len(data), 60)]
    for place in rng.integers(0, len(data), 300):
        flipped = bytearray(data)
        flipped[place] ^= 1 << int(rng.integers(0, 8))
        damaged.append(bytes(flipped))
    for content in damaged:
        file.write_bytes(content)
        try:
            read_trace(file)
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
            assert "trace.parquet" in str(error)
    assert refused > 100


@settings(max_examples=80)
@given(
    rows=st.integers(0, 200),
    num_experts=st.sampled_from([1, 8, 255, 256, 65535]),
    top_k=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_ids_come_back_sorted(rows: int, num_experts: int, top_k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    top_k = min(top_k, num_experts)
    dtype, nothing = id_dtype(num_experts), no_route(num_experts)
    ids = np.array([rng.permutation(num_experts)[:top_k] for _ in range(rows)], dtype).reshape(rows, top_k)
    ids[rng.random(rows) < 0.2] = nothing
    coded, again = np.empty_like(ids), np.empty_like(ids)
    encode(ids, coded)
    assert decode(coded, num_experts, nothing, again) == -1
    assert np.array_equal(again, np.sort(ids, axis=1))


@pytest.mark.parametrize(
    "row", [[3, 3], [7, 8], [9, 1], [255, 7], [254, 255]], ids=["twice", "beyond", "first beyond", "half known", "odd"]
)
def test_invalid_rows_are_found(row: list[int]) -> None:
    ids = np.array([[1, 2], [255, 255], row, [9, 9]], np.uint8)
    coded, again = np.empty_like(ids), np.empty_like(ids)
    encode(ids, coded)
    assert decode(coded, 8, 255, again) == 2


@pytest.mark.parametrize(
    "row", [[8, 0], [255, 3], [255, 255], [1, 0], [1, 7], [1, 255]], ids=lambda row: "+".join(map(str, row))
)
def test_invalid_encoded_rows_are_found(row: list[int]) -> None:
    """Differences as a damaged file may hold them: of 8 experts, the first beyond, more after none, too far on."""
    coded = np.array([[1, 6], [255, 0], row], np.uint8)
    assert decode(coded, 8, 255, np.empty_like(coded)) == 2
    assert decode(coded[:2], 8, 255, np.empty_like(coded[:2])) == -1


def test_an_id_out_of_range_is_found_in_top_1() -> None:
    coded = np.array([[8]], np.uint8)
    assert [decode(coded, experts, 255, np.empty_like(coded)) for experts in (8, 9)] == [0, -1]


def same(one: RoutingTrace, other: RoutingTrace) -> bool:
    return all(np.array_equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(RoutingTrace))


def test_a_trace_in_memory_reads_like_its_file(tmp_path: Path) -> None:
    trace = odd_trace(3)
    write_trace(trace, tmp_path / "t.parquet")
    file, memory = TraceReader(tmp_path / "t.parquet"), open_trace(trace)
    assert isinstance(memory, MemoryReader)
    assert same(file.empty, memory.empty)
    for step in (None, 0, 1):
        assert same(file.read(step), memory.read(step))
    assert same(RoutingTrace.concatenate(list(file.chunks())), RoutingTrace.concatenate(list(memory.chunks())))
    for field in fields(file.facts):
        assert np.array_equal(getattr(file.facts, field.name), getattr(memory.facts, field.name))
    assert not memory.files
    with pytest.raises(InputError, match="trace in memory: no step 7; it has steps 0 to 1"):
        memory.read(7)
    # Sorted ids are not copied.
    from_file = file.read()
    assert np.shares_memory(MemoryReader(from_file).read().expert_ids, from_file.expert_ids)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_sequences_are_read_in_any_order(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("parts")
    parts = [random_trace(8, seed + number) for number in range(3)]
    for number, part in enumerate(parts):
        write_trace(part, folder / f"{number}.parquet")
    reader, whole = TraceReader(folder), read_trace(folder)
    chosen = rng.permutation(12)[: rng.integers(1, 13)]
    found = reader.read_sequences(chosen)
    assert found.num_sequences == len(chosen)
    for place, index in enumerate(chosen.tolist()):
        assert np.array_equal(found.sequence(place), whole.sequence(index))
        assert found.windows[place] == whole.windows[index]
    assert reader.by_step().steps.tolist() == sorted(whole.steps.tolist())
