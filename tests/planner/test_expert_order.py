"""`order_experts`: orders keep groups together and make contiguous homes more even."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.planner.placement.expert_order import order_experts
from trimtab.trace.numbering import Numbering, permute_experts


def squares(counts_MLE: Array, parts: int) -> Array:
    """`[L]`: the sum of squared loads of so many equal parts of the experts in a row, over all M."""
    return (counts_MLE.reshape(*counts_MLE.shape[:2], parts, -1).sum(axis=-1).astype(float) ** 2).sum(axis=(0, 2))


@given(st.integers(0, 2**32), st.sampled_from((1, 2, 4, 8, 16)), st.sampled_from((2, 4, 8)), st.booleans())
def test_orders_are_permutations_that_even_ranks_and_nodes(seed: int, groups: int, ranks: int, has_nodes: bool) -> None:
    rng = np.random.default_rng(seed)
    counts_MLE = (rng.pareto(1.2, (rng.integers(1, 4), 2, 32)) * 100).astype(np.int64)
    per_node = ranks // 2 if has_nodes else ranks
    order_LE = order_experts(counts_MLE, ranks, per_node, groups)
    size = 32 // groups
    for order_E in order_LE:
        assert np.array_equal(np.sort(order_E), np.arange(32))
        groups_GN = order_E.reshape(groups, size) // size
        assert (groups_GN == groups_GN[:, :1]).all()
    after = permute_experts(counts_MLE, order_LE)

    def objective(counts: Array) -> Array:
        return squares(counts, ranks) + squares(counts, ranks // per_node)

    assert (objective(after) <= objective(counts_MLE)).all()


def test_a_hot_rank_is_spread() -> None:
    counts = np.array([[[100] * 4 + [0] * 12]])
    order_LE = order_experts(counts, 4, 2)
    assert permute_experts(counts, order_LE).reshape(4, 4).sum(axis=1).tolist() == [100] * 4
    # In two groups, only the ranks of the hot one share it.
    order_LE = order_experts(counts, 4, 2, groups=2)
    assert sorted(permute_experts(counts, order_LE).reshape(4, 4).sum(axis=1).tolist()) == [0, 0, 200, 200]


def test_groups_that_ranks_cut_are_refused() -> None:
    with pytest.raises(InputError, match="6 ranks and 4 groups"):
        order_experts(np.ones((1, 1, 12), np.int64), 6, 6, groups=4)


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_numberings_follow_one_another(seed: int, experts: int) -> None:
    """Ids go from any numbering into any other, and as through the first one."""
    rng = np.random.default_rng(seed)
    layers = np.array([0, 4])
    one, two = (Numbering().then(rng.permuted(np.tile(np.arange(experts), (2, 1)), axis=1), layers) for _ in range(2))
    assert one.then(two.order_from(one, layers, experts), layers) == two
    assert two.then(Numbering().order_from(two, layers, experts), layers) == Numbering()
    assert Numbering.from_json(one.to_json(), "here") == one
    there, back = two.order_from(one, layers, experts), one.order_from(two, layers, experts)
    assert np.array_equal(np.take_along_axis(there, back, axis=1), np.tile(np.arange(experts), (2, 1)))
