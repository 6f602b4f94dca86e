"""The incremental greedy: limits of its replicas, and the balance that it reaches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import loads_after, random_loads
from trimtab import ClusterSpec
from trimtab.planner.replicas.whole_experts import InstanceLoad
from trimtab.policies.rivals.greedy import add_replicas, replicate

SIZES = [(1, 1), (3, 3), (4, 2), (8, 2), (8, 4)]


@settings(max_examples=200)
@given(
    st.booleans().flatmap(lambda within_node: random_loads(SIZES, within_node=within_node, most_slots=3)),
    st.sampled_from([1.0, 1.1]),
    st.sampled_from([1, 30, 500]),
)
def test_replicas_respect_slots_shares_and_domains(load: InstanceLoad, threshold: float, smallest: int) -> None:
    target = int(np.ceil(load.loads_R.mean() * threshold))
    replicas_3P = add_replicas(load, target, smallest)
    experts_P, ranks_P, tokens_P = replicas_3P
    assert loads_after(load, replicas_3P.T).max() <= max(load.loads_R.max(), target)
    assert np.all((tokens_P == 0) | (tokens_P >= smallest))
    assert np.all(load.counts_E >= np.bincount(experts_P, tokens_P, len(load.counts_E)))
    assert np.bincount(ranks_P, minlength=1).max() <= load.slots
    assert np.all(load.home_E[experts_P] // load.ranks_per_domain == ranks_P // load.ranks_per_domain)
    assert np.all(load.home_E[experts_P] != ranks_P)
    assert len(np.unique(replicas_3P[:2], axis=1).T) == replicas_3P.shape[1]


@pytest.mark.parametrize(
    ("ranks", "experts", "slots", "limit"), [(8, 128, 1, 1.06), (8, 128, 2, 1.02), (64, 256, 2, 1.02)]
)
def test_ranks_end_near_the_mean(ranks: int, experts: int, slots: int, limit: float) -> None:
    ratios = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        popularity_E = rng.permutation(np.arange(1, experts + 1) ** -0.6)
        counts_RE = rng.multinomial(32768, popularity_E / popularity_E.sum(), ranks)
        home_E, cluster = np.arange(experts) * ranks // experts, ClusterSpec(ranks, 8, slots)
        replicas_P2, quotas_PR = replicate(
            counts_RE, home_E, cluster, within_node=False, threshold=1.01, smallest_share=128
        )
        tokens_P = quotas_PR.sum(axis=1)
        assert np.all(tokens_P >= 128)
        load = InstanceLoad.of(counts_RE.sum(axis=0), home_E, cluster, within_node=False)
        loads_R = loads_after(load, np.column_stack([replicas_P2, tokens_P]))
        ratios.append(loads_R.max() / loads_R.mean())
    assert np.mean(ratios) <= limit


def test_within_nodes_the_target_is_the_mean_of_the_busiest_node() -> None:
    """Node 0 carries 1600 and can't get below 800 a rank, so node 1 is left as it is up to that."""
    counts_RE = np.zeros((4, 8), np.int64)
    counts_RE[0] = [1000, 200, 200, 200, 700, 0, 100, 0]
    home_E = np.arange(8) // 2
    replicas_P2, quotas_PR = replicate(
        counts_RE, home_E, ClusterSpec(4, 2, 2), within_node=True, threshold=1.0, smallest_share=1
    )
    assert replicas_P2.tolist() == [[0, 1]]
    assert quotas_PR.sum() == 400


def test_a_rank_with_a_free_slot_moves_its_own_tokens_to_take_others() -> None:
    """Rank 2 has all the room but one slot, which rank 0 takes; rank 1 then uses rank 0's."""
    counts_E, home_E = np.array([900, 0, 300, 300, 0, 0]), np.array([0, 0, 1, 1, 2, 2])
    load = InstanceLoad.of(counts_E, home_E, ClusterSpec(3, 3, 1), within_node=False)
    assert loads_after(load, add_replicas(load, 500, 1).T).max() == 500


def test_ranks_of_one_node_are_reduced_although_those_of_another_can_not_be() -> None:
    """Both ranks of node 0 have more than the target; node 1 has the room for what its first rank has above it."""
    load = InstanceLoad.of(np.array([1000, 600, 900, 100]), np.arange(4), ClusterSpec(4, 2, 1), within_node=True)
    assert loads_after(load, add_replicas(load, 500, 1).T).tolist() == [1000, 600, 500, 500]
