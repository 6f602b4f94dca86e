"""Encoded ids are decoded in ascending order, and invalid rows are found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.trace import id_dtype, no_route
from trimtab.trace.row_groups import decode, encode


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
