"""Placements for rollout engines: every expert is there, ranks are full, and loads more even than EPLB leaves them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab import InputError, RoutingTrace
from trimtab.planner.placement.packing import rebalance
from trimtab.planner.placement.serving_placement import count_parts, fill_slots, slot_loads
from trimtab.trace import PRESETS, TraceReader, store, synthesize_preset, write_trace


def test_by_hand() -> None:
    """Two parts, four experts, two ranks: experts 0 and 1 are hot together, so they part; so are 2 and 3."""
    counts_MLE = np.array([[[8, 8, 0, 0]], [[0, 0, 8, 8]]])
    slots_LP = fill_slots(counts_MLE, 4, 2, 2)
    assert [sorted(part) for part in slots_LP.reshape(2, 2).tolist()] in ([[0, 2], [1, 3]], [[0, 3], [1, 2]])
    assert slot_loads(counts_MLE, slots_LP, 2).tolist() == [[[8, 8]], [[8, 8]]]


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([2, 4]), st.sampled_from([1, 2]), st.sampled_from([0, 4, 8]))
def test_every_expert_is_there(seed: int, ranks: int, nodes: int, redundant: int) -> None:
    counts_MLE = np.random.default_rng(seed).integers(0, 1000, (6, 2, 16)) ** 2
    slots_LP = fill_slots(counts_MLE, 16 + redundant, ranks, ranks // nodes)
    loads_MLR = slot_loads(counts_MLE, slots_LP, ranks)
    np.testing.assert_allclose(loads_MLR.sum(axis=2), counts_MLE.sum(axis=2))
    for layer, expert_P in enumerate(slots_LP):
        packed_P, copies_E = rebalance(counts_MLE[:, layer].sum(axis=0), 16 + redundant, 1, 1, ranks)
        if copies_E.max() > ranks:
            continue
        np.testing.assert_array_equal(np.bincount(expert_P, minlength=16), copies_E)
        is_apart = all(len(set(slots)) == len(slots) for slots in packed_P.reshape(ranks, -1).tolist())
        if nodes == 1 and is_apart:  # what is squared counts whole tokens
            before = slot_loads(counts_MLE[:, layer : layer + 1], packed_P[None], ranks)
            assert (loads_MLR[:, layer] ** 2).sum() <= (before**2).sum() * (1 + 1e-3)


@settings(max_examples=150)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(2, 1, 8), (8, 2, 8), (4, 4, 16), (16, 2, 32), (8, 1, 9), (6, 2, 4)]),
    st.sampled_from([0.5, 2.0, 8.0]),
    st.data(),
)
def test_no_rank_has_an_expert_twice(seed: int, shape: tuple[int, int, int], skew: float, data: st.DataObject) -> None:
    """Also where one expert has nearly all tokens, and where each rank has nearly all experts."""
    ranks, nodes, experts = shape
    sizes = [slots for slots in range(1, experts + 1) if slots * ranks >= experts]
    slots = data.draw(st.sampled_from(sizes))
    rng = np.random.default_rng(seed)
    popularity_E = rng.permutation(np.arange(1, experts + 1) ** -skew)
    counts_MLE = rng.multinomial(10_000, popularity_E / popularity_E.sum(), (3, 2))
    for expert_P in fill_slots(counts_MLE, slots * ranks, ranks, ranks // nodes):
        assert set(expert_P) == set(range(experts))
        assert all(len(set(mine)) == slots for mine in expert_P.reshape(ranks, slots).tolist())


def test_parts_of_a_trace(tmp_path: Path) -> None:
    trace = synthesize_preset(
        PRESETS["qwen3-30b-math"], num_sequences=40, mean_length=30, max_length=60, num_layers=2, num_experts=16,
        top_k=4, num_steps=1, seed=0,
    )  # fmt: skip
    write_trace(trace, tmp_path / "a.parquet")
    counts_MLE = count_parts(TraceReader(tmp_path / "a.parquet"), 4)
    expected = [np.bincount(trace.expert_ids[:, layer].reshape(-1), minlength=16) for layer in range(2)]
    np.testing.assert_array_equal(counts_MLE.sum(axis=0), expected)
    tokens_M = counts_MLE[:, 0].sum(axis=1) / 4
    assert tokens_M.max() - tokens_M.min() <= 2 * trace.sequence_lengths.max()


def test_parts_run_on_over_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence belongs to the part in which its middle lies; 20 tokens, four parts of five."""
    monkeypatch.setattr(store, "ROW_GROUP_BYTES", 6)
    lengths, parts = [1, 4, 9, 0, 2, 4, 0], [0, 0, 1, 2, 3, 3, 3]
    ids = [np.full((length, 1, 1), index) for index, length in enumerate(lengths)]
    write_trace(RoutingTrace.from_sequences(ids, num_experts=7), tmp_path / "a.parquet")
    reader = TraceReader(tmp_path / "a.parquet")
    assert len(list(reader.chunks())) == 3
    counts_MLE = count_parts(reader, 4)
    assert counts_MLE.shape == (4, 1, 7)
    for index, (length, part) in enumerate(zip(lengths, parts, strict=True)):
        assert counts_MLE[:, 0, index].tolist() == [length * (m == part) for m in range(4)]


def test_nodes_are_made_even_too() -> None:
    """One expert a rank: ranks can't be helped, but nodes can, where experts that are hot together part."""
    counts_MLE = np.array([[[8, 8, 0, 0]], [[0, 0, 8, 8]]])
    slots_LP = fill_slots(counts_MLE, 4, 4, 2)
    assert slot_loads(counts_MLE, slots_LP, 2).tolist() == [[[8, 8]], [[8, 8]]]


def test_refused() -> None:
    counts_MLE = np.ones((1, 1, 10), np.int64)
    with pytest.raises(InputError, match="4 ranks don't divide 10 experts and 0 redundant ones; use 2 redundant"):
        fill_slots(counts_MLE, 10, 4, 4)
    with pytest.raises(InputError, match="2 ranks don't divide 10 experts"):
        fill_slots(counts_MLE, 8, 2, 2)
    with pytest.raises(InputError, match="2 ranks have 11 slots each, and there are 10 experts; use 10 redundant"):
        fill_slots(counts_MLE, 22, 2, 2)
    with pytest.raises(InputError, match="3 ranks a node don't divide 4 ranks"):
        fill_slots(counts_MLE, 12, 4, 3)
