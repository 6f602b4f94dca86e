"""Files that a stranger may send: damaged ones are read or refused in one line, in little memory."""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.examples import examples
from helpers.planner_steps import steady_step
from trimtab import InputError, RoutingTrace, StepPlan
from trimtab.cluster import load_cluster, load_model
from trimtab.cluster.presets import read_preset
from trimtab.files import MOST_TEXT_BYTES, read_small_text
from trimtab.trace import read_trace, synthesize, write_trace
from trimtab.trace.parquet_footer import read_columns
from trimtab.trace.row_groups import WINDOW_BYTES, schema_of, table_of

GB = 1 << 30
NUMBERS = (-(2**63), -1, 0, 1, 255, 2**31, 2**40, 2**63 - 1)


def plan_file(path: Path) -> None:
    steady_step(1).plan().plans[0].save(path)


def trace_file(path: Path) -> None:
    write_trace(synthesize(num_sequences=6, sequence_length=9, num_layers=2, num_experts=8, top_k=2, zipf=0.9), path)


def cluster_file(path: Path) -> None:
    path.write_text(read_preset("cluster", "h100x8") or "")


def model_file(path: Path) -> None:
    path.write_text(read_preset("model", "deepseek-v3") or "")


KINDS: dict[str, tuple[str, Callable[[Path], None], Callable[[Path], Any]]] = {
    "plan": ("p.npz", plan_file, StepPlan.load),
    "trace": ("t.parquet", trace_file, read_trace),
    "cluster": ("c.toml", cluster_file, lambda path: load_cluster(path, ranks=8)),
    "model": ("config.json", model_file, load_model),
}


def zigzag(number: int) -> int:
    return 2 * number if number >= 0 else -2 * number - 1


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Bytes changed, removed, repeated, or replaced by a telling number or a longer text."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, size = rng.randrange(len(data)), rng.choice((1, 4, 8, 30, 200))
        kind = rng.randrange(6)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at : at + 8] = struct.pack("<q", rng.choice(NUMBERS))
        elif kind == 2:
            del data[at : at + size]
        elif kind == 3:
            data[at:at] = data[at : at + size] * rng.choice((1, 50))
        elif kind == 4:
            data[at : at + 1] = str(rng.choice(NUMBERS) * rng.choice((1, 10**30))).encode()
        else:
            data[at:at] = rng.choice((b"[" * 3000, b"\x1b[2J", b"\xff\xfe", b"9" * 5000, b"{", b'"', b"e999"))
        data = data or bytearray(b"\0")
    return bytes(data)


def read_damaged(kind: str, folder: str, count: int) -> None:
    """Reads `count` damaged files in this process, which may take 1 GB more than it has."""
    name, write, read = KINDS[kind]
    path = Path(folder) / name
    write(path)
    content = path.read_bytes()
    # What is imported late is no memory of a file.
    read(path)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + GB, used + GB))
    # Arrow ends the process for the last one, if it is asked for a column.
    for seed in (*range(count), 2580):
        path.write_bytes(damaged(content, random.Random(seed)))
        try:
            read(path)
        except InputError as error:
            assert "\n" not in str(error), seed
            assert len(str(error)) < 2000, seed
        except BaseException as error:
            raise AssertionError(f"damaged with seed {seed}: {error!r}") from error


@pytest.mark.longer
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    arguments = kind, str(tmp_path), examples(short=150, long=2500)
    process = multiprocessing.get_context("fork").Process(target=read_damaged, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("sequences", [0, 1, 300])
def test_claims_of_a_footer_are_those_that_arrow_reads(sequences: int, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    trace = synthesize(num_sequences=300, sequence_length=9, num_layers=2, num_experts=8, top_k=2, zipf=0.9)
    write_trace(trace.part(0, sequences), path)
    parquet = pq.ParquetFile(path)
    found = read_columns(path)
    assert len(found) == parquet.num_row_groups
    for group, columns in enumerate(found):
        metadata = parquet.metadata.row_group(group)
        expected = [metadata.column(index) for index in range(metadata.num_columns)]
        assert [(column.path, column.num_values, column.uncompressed_bytes) for column in columns] == [
            (column.path_in_schema, column.num_values, column.total_uncompressed_size) for column in expected
        ]

    # A row group with a column "a" of 5 values and 7 bytes.
    def small(values: int, size: int) -> bytes:
        numbers = b"\x26" + bytes([zigzag(values)]) + b"\x16" + bytes([zigzag(size)]) + b"\x16\x00\x26\x08"
        column = b"\x3c\x39\x18\x01a" + numbers + b"\0\0"
        footer = b"\x49\x1c\x19\x1c" + column + b"\0\0"
        return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"

    path.write_bytes(small(5, 7))
    assert read_columns(path) == [[("a", 5, 7)]]
    # What is below 0 would make room for other columns.
    for values, bytes_ in ((5, -7), (-5, 7)):
        path.write_bytes(small(values, bytes_))
        with pytest.raises(InputError, match="column a has a negative size"):
            read_columns(path)
    # Lists in lists.
    path.write_bytes(b"PAR1" + b"\x19" * 5000 + (5000).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(InputError, match="its footer is damaged"):
        read_columns(path)


def test_a_small_plan_file_holds_no_large_arrays(tmp_path: Path) -> None:
    plan_file(tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz") as arrays:
        values = dict(arrays)
    np.savez_compressed(tmp_path / "bomb.npz", **values | {"micro_step": np.zeros(10_000_000, np.int32)})
    assert (tmp_path / "bomb.npz").stat().st_size < 100_000
    with pytest.raises(InputError, match=r"bomb\.npz: not a step plan"):
        StepPlan.load(tmp_path / "bomb.npz")
    # A header that claims more than the member has.
    content = (tmp_path / "p.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "p.npz") as archive, zipfile.ZipFile(tmp_path / "claims.npz", "w") as changed:
        for info in archive.infolist():
            member = archive.read(info)
            changed.writestr(info, member.replace(b"'shape': (", b"'shape': (99999999999, ", 1)[: len(content)])
    with pytest.raises(InputError, match=r"claims\.npz: not a step plan"):
        StepPlan.load(tmp_path / "claims.npz")


def test_texts_are_refused_above_16_mb(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"a": "x" * MOST_TEXT_BYTES}))
    for read in (read_small_text, load_model, lambda path: load_cluster(path, ranks=8)):
        with pytest.raises(InputError, match=r"config\.json: larger than 16 MB"):
            read(path)
    # As Windows writes it.
    path.write_bytes(b"\xef\xbb\xbf{}")
    assert read_small_text(path) == "{}"


def varint(number: int) -> bytes:
    """A whole number as a footer has it."""
    number, found = zigzag(number), bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes((*found, number))


def lie(path: Path, value: int, claimed: int) -> None:
    """Replace a number in a footer, wherever it is."""
    content = path.read_bytes()
    size = int.from_bytes(content[-8:-4], "little")
    footer = content[-8 - size : -8]
    assert varint(value) in footer
    footer = footer.replace(varint(value), varint(claimed))
    path.write_bytes(content[: -8 - size] + footer + len(footer).to_bytes(4, "little") + b"PAR1")


def expect_refusal_before_arrow(path: Path, message: str) -> None:
    read_by_arrow = mock.patch.object(pq.ParquetFile, "read_row_groups", side_effect=AssertionError)
    with read_by_arrow, pytest.raises(InputError, match=message):
        read_trace(path)


@pytest.mark.parametrize("lies", [False, True])
def test_pages_are_not_larger_than_a_footer_claims(lies: bool, tmp_path: Path) -> None:
    """A few bytes of compressed text, 3 GB of it in a worse file, are refused before they are unpacked."""
    path = tmp_path / "t.parquet"
    trace = synthesize(num_sequences=2, sequence_length=4, num_layers=1, num_experts=8, top_k=1, zipf=0.0)
    table = table_of(trace, schema_of(trace))
    index = table.schema.get_field_index("domain")
    table = table.set_column(index, table.schema.field(index), pa.array(["x" * 3_000_000, "y"], pa.string()))
    pq.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)
    assert path.stat().st_size < 10_000
    if lies:
        lie(path, pq.ParquetFile(path).metadata.row_group(0).column(index).total_uncompressed_size, 50)
    expect_refusal_before_arrow(path, "row group 0: .* bytes beside the expert ids, which is more than")


@pytest.mark.parametrize("lies", [False, True])
def test_windows_take_memory_in_proportion_to_the_file(
    lies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal windows take a bit each in a file, and 170 bytes in memory."""
    path, count = tmp_path / "t.parquet", 4 * 1000
    ids = [np.zeros((1000, 1, 1), np.uint8)] * 4
    windows = [((0, 1),) * 1000] * 4
    write_trace(RoutingTrace.from_sequences(ids, num_experts=2, shape=(1, 1), windows=windows), path)
    # As many times the file as they need.
    monkeypatch.setattr("trimtab.trace.row_groups.CLAIMED_BYTES", 0)
    monkeypatch.setattr("trimtab.trace.row_groups.CLAIMED_TIMES", count * WINDOW_BYTES // path.stat().st_size + 1)
    assert read_trace(path).windows.tolist() == windows
    if lies:
        lie(path, count, 9)
    monkeypatch.setattr("trimtab.trace.row_groups.CLAIMED_BYTES", count * WINDOW_BYTES // 2)
    monkeypatch.setattr("trimtab.trace.row_groups.CLAIMED_TIMES", 0)
    expect_refusal_before_arrow(path, rf"the file claims to have {count - 4} windows, which is more than")


def test_a_file_has_no_more_pages_than_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that share their pages could take any time to read."""
    trace_file(tmp_path / "t.parquet")
    monkeypatch.setattr("trimtab.trace.parquet_footer.BYTES_A_PAGE", 1 << 30)
    read_trace(tmp_path / "t.parquet")
    part = synthesize(num_sequences=1, sequence_length=4, num_layers=1, num_experts=8, top_k=1, zipf=0.0)
    write_trace([part] * 20, tmp_path / "t.parquet")
    expect_refusal_before_arrow(tmp_path / "t.parquet", "more pages than a file of its size can hold")


def test_a_column_has_a_value_for_each_sequence(tmp_path: Path) -> None:
    trace_file(tmp_path / "t.parquet")
    lie(tmp_path / "t.parquet", 6, 7)
    expect_refusal_before_arrow(tmp_path / "t.parquet", r"row group 0 has \d sequences, and \d step|footer is damaged")
