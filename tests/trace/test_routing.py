"""`RoutingTrace`: shapes, ids, selection and concatenation; its skew, and experts in random order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab import InputError, RoutingTrace, write_trace
from trimtab.trace import TraceReader, hash_tokens, id_dtype, no_route, store, synthesize
from trimtab.trace.counting import count_experts
from trimtab.trace.numbering import permute_experts, random_orders
from trimtab.trace.statistics import layer_skew


def small_trace(num_experts: int = 8) -> RoutingTrace:
    ids = [np.array([[[0, 1]], [[2, 3]]]), np.array([[[4, 5]]])]
    return RoutingTrace.from_sequences(ids, num_experts=num_experts, prompt_lengths=[1, 1], steps=[3, 4])


@pytest.mark.parametrize(
    ("num_experts", "dtype", "largest"), [(255, "u1", 255), (256, "u2", 65535), (257, "u2", 65535)]
)
def test_ids_are_as_narrow_as_they_can_be(num_experts: int, dtype: str, largest: int) -> None:
    assert id_dtype(num_experts) == np.dtype(dtype)
    assert no_route(num_experts) == largest


def test_sequences_are_views_and_selections_keep_their_order() -> None:
    trace = small_trace()
    assert trace.sequence(1).tolist() == [[[4, 5]]]
    selected = trace.select([1, 0])
    assert selected.sequence(0).tolist() == [[[4, 5]]]
    assert selected.steps.tolist() == [4, 3]
    assert trace.select([]).num_sequences == 0


def test_concatenation_reverses_selection() -> None:
    trace = small_trace()
    joined = RoutingTrace.concatenate([trace.select([0]), trace.select([1])])
    assert np.array_equal(joined.expert_ids, trace.expert_ids)
    assert np.array_equal(joined.sequence_starts, trace.sequence_starts)


def test_traces_with_other_layers_cant_be_joined() -> None:
    trace = small_trace()
    for other in (small_trace(9), replace(trace, layer_indices=trace.layer_indices + 1)):
        with pytest.raises(InputError, match="different models"):
            RoutingTrace.concatenate([trace, other])


@pytest.mark.parametrize("row", [[3, 3], [3, 8], [3, 255]], ids=["twice", "out of range", "half unknown"])
def test_errors_name_invalid_ids(row: list[int]) -> None:
    trace = RoutingTrace.from_sequences([np.array([[[0, 1]], [row]])], num_experts=8)
    with pytest.raises(InputError, match=r"token 1 in MoE layer 0 has expert ids \[3"):
        trace.check()


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 300), st.data())
def test_counting_equals_plain_numpy(tokens: int, layers: int, num_experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, min(4, num_experts)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    ids = np.argsort(rng.random((tokens, layers, num_experts)), axis=-1)[:, :, :top_k]
    ids[rng.random(tokens) < 0.2] = no_route(num_experts)
    cuts = sorted(rng.integers(0, tokens + 1, 3).tolist())
    pieces = np.split(ids, cuts)
    trace = RoutingTrace.from_sequences(pieces, num_experts=num_experts)
    group = rng.integers(0, 3, len(pieces))
    counts_GLE = count_experts(trace, group, 3)
    for g in range(3):
        for layer in range(layers):
            members = [p[:, layer].ravel() for p, of in zip(pieces, group, strict=True) if of == g]
            chosen = np.concatenate([np.empty(0), *members])
            expected = np.bincount(chosen[chosen < num_experts].astype(int), minlength=num_experts)
            assert np.array_equal(counts_GLE[g, layer], expected)


def test_every_token_and_its_place_changes_the_hash() -> None:
    tokens = np.arange(1000) * 7919
    others = [tokens[:-1], tokens[1:], tokens[::-1], np.append(tokens, 0), np.append(0, tokens)]
    for place in (0, 1, 500, 998, 999):
        for change in (1, 1 << 8, 1 << 20, 1 << 40):
            others.append(tokens.copy())
            others[-1][place] += change
    assert len({hash_tokens(each) for each in (tokens, *others)}) == 1 + len(others)
    assert hash_tokens(tokens) == hash_tokens(tokens.tolist()) == hash_tokens(tokens.astype(np.int32)) < 1 << 64
    assert hash_tokens([]) != 0


def test_even_synthetic_routing_is_exactly_even() -> None:
    trace = synthesize(num_sequences=4, sequence_length=16, num_layers=3, num_experts=32, top_k=4, zipf=0.0)
    trace.check()
    assert np.all(count_experts(trace, np.zeros(4, int), 1) == 64 * 4 // 32)


def test_skewed_synthetic_routing_is_valid_and_repeatable() -> None:
    make = lambda: synthesize(num_sequences=4, sequence_length=64, num_layers=2, num_experts=32, top_k=4, zipf=1.2)  # noqa: E731
    make().check()
    assert np.array_equal(make().expert_ids, make().expert_ids)
    counts = count_experts(make(), np.zeros(4, int), 1)[0]
    assert np.all(counts.max(axis=1) > 2 * counts.mean(axis=1))


def test_windows_are_checked_against_their_own_sequence() -> None:
    trace = small_trace()
    windows = np.empty(2, object)
    windows[:] = (), ((0, 1), (1, 1))
    replace(trace, windows=windows[::-1].copy())
    with pytest.raises(InputError, match="sequence 1 has 1 "):
        replace(trace, windows=windows)


def test_synthetic_popularity_follows_the_exponent() -> None:
    trace = synthesize(num_sequences=50, sequence_length=200, num_layers=2, num_experts=4, top_k=1, zipf=1.0)
    for layer in range(2):
        counts = np.bincount(trace.expert_ids[:, layer, 0], minlength=4)
        assert np.sort(counts)[::-1] / 10_000 == pytest.approx(np.array([12, 6, 4, 3]) / 25, abs=0.02)


def test_skew_equals_a_computation_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ROW_GROUP_BYTES", 1)
    nothing = [255, 255]
    sequences = [[[[0, 1], [4, 3]], [[0, 2], nothing]], [[[1, 0], nothing]], [[nothing, [3, 4]], [[0, 4], [3, 4]]]]
    write_trace(RoutingTrace.from_sequences(sequences, num_experts=5), tmp_path / "trace.parquet")
    reader = TraceReader(tmp_path / "trace.parquet")
    assert len(list(reader.chunks())) == 3
    skew, unknown = layer_skew(reader)
    assert unknown == 3
    assert skew.token_counts_LE.tolist() == [[4, 2, 1, 0, 1], [0, 0, 0, 3, 3]]
    # 8 and 6 tokens, 1.6 and 1.2 by expert; of five experts, two are the busier half.
    np.testing.assert_allclose(skew.hottest_over_mean_L, [2.5, 2.5])
    np.testing.assert_allclose(skew.busier_half_share_L, [0.75, 1.0])


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 12), st.integers(0, 2**32))
def test_every_layer_keeps_its_counts_in_one_other_order(rows: int, layers: int, experts: int, seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 1000, (rows, 2, layers, experts)).astype(np.uint16)
    # Marks every column, to find it again.
    marked = np.concatenate((np.broadcast_to(np.arange(experts, dtype=np.uint16), (1, 2, layers, experts)), counts))
    permuted = permute_experts(marked, random_orders(layers, experts, seed))
    assert permuted.dtype == counts.dtype
    assert permuted.shape == marked.shape
    order_LE = permuted[0, 0].astype(np.int64)
    for layer in range(layers):
        assert np.array_equal(np.sort(order_LE[layer]), np.arange(experts))
        assert np.array_equal(permuted[..., layer, :], marked[..., layer, :][..., order_LE[layer]])
    assert np.array_equal(permute_experts(marked, random_orders(layers, experts, seed)), permuted)


def test_layers_and_seeds_have_orders_of_their_own() -> None:
    first, second = random_orders(2, 64, 0), random_orders(2, 64, 1)
    assert not np.array_equal(first[0], np.arange(64))
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first, second)
    # A layer's order does not depend on how many layers follow.
    assert np.array_equal(random_orders(1, 64, 0), first[:1])
