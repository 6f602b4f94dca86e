"""The Parquet store: what is written comes back, and damaged files are refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trimtab import InputError, RoutingTrace, read_trace, write_trace
from trimtab.trace import no_route


def random_trace(num_experts: int, seed: int = 0) -> RoutingTrace:
    rng = np.random.default_rng(seed)
    lengths = [5, 0, 17, 1]
    sequences = [np.argsort(rng.random((n, 3, num_experts)), axis=-1)[:, :, :4] for n in lengths]
    sequences[2][4] = no_route(num_experts)
    return RoutingTrace.from_sequences(
        sequences,
        num_experts=num_experts,
        layer_indices=[1, 2, 5],
        prompt_lengths=[2, 0, 3, 1],
        steps=[7, 7, 8, 9],
        sequence_hashes=rng.integers(1, 1 << 63, 4, dtype=np.uint64),
        domains=["maths", "", "code", "maths"],
        model="test model",
    )


@pytest.mark.parametrize("num_experts", [4, 255, 256, 257])
def test_round_trip(tmp_path: Path, num_experts: int) -> None:
    trace = random_trace(num_experts)
    write_trace(trace, tmp_path / "deep" / "trace.parquet")
    again = read_trace(tmp_path / "deep" / "trace.parquet")
    assert again.expert_ids.dtype == trace.expert_ids.dtype
    assert np.array_equal(again.expert_ids, np.sort(trace.expert_ids, axis=-1))
    for name in ("sequence_starts", "prompt_lengths", "steps", "sequence_hashes", "domains", "layer_indices"):
        before, after = getattr(trace, name), getattr(again, name)
        assert before.dtype == after.dtype, name
        assert np.array_equal(before, after), name
    assert (again.num_experts, again.model) == (num_experts, "test model")
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "trace.parquet"]


def test_a_trace_without_sequences_survives(tmp_path: Path) -> None:
    write_trace(random_trace(8).select([]), tmp_path / "empty.parquet")
    assert read_trace(tmp_path / "empty.parquet").num_sequences == 0


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.parquet: no such file"):
        read_trace(tmp_path / "nowhere.parquet")


def test_other_parquet_files_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(InputError, match="not a routing trace"):
        read_trace(tmp_path / "other.parquet")


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
