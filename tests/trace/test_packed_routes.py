"""`pack` and `unpack`: routing comes back whole, in few bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace import no_route, pack, unpack

SHAPES = [(128, 8), (512, 10), (8, 2), (64, 6), (5, 5), (300, 1), (65535, 3), (40, 40), (120, 60)]


def routing(tokens: int, layers: int, experts: int, top_k: int, unknown: float, seed: int) -> Array:
    """Ids in random order, `[tokens, layers, top_k]`, int64."""
    rng = np.random.default_rng(seed)
    ids_TLK = np.empty((tokens, layers, top_k), np.int64)
    for place in np.ndindex(tokens, layers):
        ids_TLK[place] = rng.choice(experts, top_k, replace=False)
    ids_TLK[rng.random((tokens, layers)) < unknown] = -1
    return ids_TLK


@settings(max_examples=150)
@given(
    st.sampled_from(SHAPES),
    st.integers(0, 40),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([np.int16, np.int32, np.int64, np.uint8, np.uint16]),
    st.integers(0, 2**32),
)
@example((128, 8), 7, 3, 0.3, np.int32, 0)
@example((120, 60), 9, 2, 0.3, np.int32, 0)
def test_what_was_packed_comes_back(
    shape: tuple[int, int], tokens: int, layers: int, unknown: float, dtype: Any, seed: int
) -> None:
    experts, top_k = shape
    if np.iinfo(dtype).max < experts:
        dtype = np.int32
    ids_TLK = routing(tokens, layers, experts, top_k, unknown, seed)
    given_ids = ids_TLK.astype(dtype)
    if np.dtype(dtype).kind == "u":
        given_ids[ids_TLK < 0] = no_route(experts)
    payload = pack(given_ids, experts)
    unpacked = unpack(payload)
    assert unpacked.dtype == (np.int16 if experts < 32768 else np.int32)
    assert np.array_equal(unpacked, np.sort(ids_TLK, axis=-1))
    chosen = list(range(layers))[::-2]
    assert np.array_equal(unpack(payload, layers=chosen), unpacked[:, chosen])
    assert unpack(pack(given_ids, experts, layers=chosen)).tolist() == unpacked[:, chosen].tolist()


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (128, 8), (256, 8), (64, 6)])
def test_a_token_takes_little_more_than_the_bits_of_its_set(experts: int, top_k: int) -> None:
    """Random sets: nothing can be below."""
    bits = math.log2(math.comb(experts, top_k))
    payload = pack(routing(4_000, 1, experts, top_k, 0.0, 0), experts)
    assert 4_000 * bits / 8 < len(payload) < 1.5 * 4_000 * bits / 8


def test_the_first_wrong_token_is_named() -> None:
    ids_TLK = np.random.default_rng(1).permuted(np.tile(np.arange(20), (9_001, 5, 1)), axis=-1)[..., :3]
    ids_TLK[9_000, 0] = 4
    ids_TLK[8_999, 2] = 4
    with pytest.raises(InputError, match=r"token 8999 .* layer 2"):
        pack(ids_TLK, 20)
    ids_TLK[70, 3, 1] = 256 + 4
    with pytest.raises(InputError, match=r"token 70 .* layer 3"):
        pack(ids_TLK, 20)
    assert unpack(pack(ids_TLK, 20, layers=[1])).shape == (9_001, 1, 3)


def test_layers_keep_their_numbers() -> None:
    ids_TLK = routing(5, 6, 16, 2, 0.0, 0)
    part = pack(ids_TLK, 16, layers=[4, 1])
    assert np.array_equal(unpack(part, layers=[1]), np.sort(ids_TLK[:, [1]], axis=-1))
    with pytest.raises(InputError, match="layer 2 is not there; the routing payload has 4, 1"):
        unpack(part, layers=[2])
    with pytest.raises(InputError, match="layer 6 is not there; the ids have 0, 1, 2, 3, 4, 5"):
        pack(ids_TLK, 16, layers=[6])


def test_tensors_and_arrays_of_bytes() -> None:
    torch = pytest.importorskip("torch")
    ids_TLK = routing(9, 2, 16, 2, 0.2, 1)
    payload = pack(torch.from_numpy(ids_TLK), 16)
    assert payload == pack(ids_TLK, 16)
    expected = np.sort(ids_TLK, axis=-1)
    as_tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    for form in (bytearray(payload), memoryview(payload), np.frombuffer(payload, np.uint8), as_tensor):
        assert np.array_equal(unpack(form), expected)
    assert torch.from_numpy(unpack(payload)).dtype == torch.int16


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3, 3], r"token 1 has the experts \[3, 3\] in layer 1"),
        ([16, 0], r"token 1 has the experts \[16, 0\] in layer 1"),
        ([-1, 0], r"token 1 has the experts \[-1, 0\] in layer 1"),
        ([-2, 0], "they should be distinct and below 16, or all -1"),
    ],
)
def test_ids_that_are_no_set_are_refused_by_place(ids: list[int], message: str) -> None:
    ids_TLK = routing(4, 2, 16, 2, 0.0, 0)
    ids_TLK[1, 1] = ids
    with pytest.raises(InputError, match=message):
        pack(ids_TLK, 16)


def test_odd_arrays_are_refused() -> None:
    for odd in (np.zeros((2, 2), int), np.zeros((2, 2, 2)), np.zeros((2, 2, 2), np.uint64)):
        with pytest.raises(InputError, match=r"of signed integers, uint8 or uint16"):
            pack(odd, 8)
    with pytest.raises(InputError, match="the ids are 3 of 2 experts"):
        pack(np.zeros((1, 1, 3), int), 2)
    with pytest.raises(InputError, match="an array of int64; it should be bytes, or uint8"):
        unpack(np.zeros(40, int))
    with pytest.raises(InputError, match="not a routing payload"):
        unpack(b"")
    with pytest.raises(InputError, match="a routing payload of an earlier version; it should be what this version's"):
        unpack(b"TTP1" + bytes(60))
    with pytest.raises(InputError, match="not a routing payload"):
        unpack(b"TTP2" + bytes(4))
    assert unpack(pack(routing(3, 2, 8, 2, 0.0, 0), 8, layers=iter([1]))).shape == (3, 1, 2)  # type: ignore[arg-type]


@settings(max_examples=100)
@given(st.data())
def test_damaged_bytes_are_refused(data: st.DataObject) -> None:
    experts, top_k = data.draw(st.sampled_from([(20, 3), (120, 60)]))
    payload = bytearray(pack(routing(11, 2, experts, top_k, 0.2, 0), experts))
    if data.draw(st.booleans()):
        payload = payload[: data.draw(st.integers(0, len(payload) - 1))]
    else:
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(InputError, match=r"not a routing payload|is damaged"):
        unpack(payload)
