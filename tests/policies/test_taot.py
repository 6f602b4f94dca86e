"""TAOT: transport against a plain reference and the least traffic between nodes, replicas, and as a policy."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.policies import loads_after, skewed_load
from trimtab import ClusterSpec
from trimtab.array_type import Array
from trimtab.planner.replicas.whole_experts import InstanceLoad
from trimtab.policies.rivals.taot import Transport, match_replicas, transport_flow


def skewed(seed: int, ranks: int, experts: int, *, per_node: int, slots: int) -> InstanceLoad:
    return skewed_load(seed, ranks, experts, zipf=0.8, tokens=8192, per_node=per_node, slots=slots)


def plain_flow(load: InstanceLoad, transport: Transport) -> Array:
    """Sinkhorn-Knopp with whole matrices, for ranks above and below the mean."""
    mean = load.loads_R.sum() / len(load.loads_R)
    above, below = np.flatnonzero(load.loads_R > mean), np.flatnonzero(load.loads_R < mean)
    near = above[:, None] // load.ranks_per_node == below // load.ranks_per_node
    kernel = np.exp(-np.where(near, 1.0, transport.far_cost) / transport.entropy)
    give, take = np.ones(len(above)), np.ones(len(below))
    for _ in range(transport.iterations):
        give = (load.loads_R[above] - mean) / (kernel @ take)
        take = (mean - load.loads_R[below]) / (kernel.T @ give)
    flow = np.zeros((len(load.loads_R), len(load.loads_R)))
    flow[np.ix_(above, below)] = give[:, None] * kernel * take
    return flow


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("ranks", "per_node"), [(8, 8), (16, 4), (32, 8)])
def test_flow_equals_a_plain_sinkhorn(seed: int, ranks: int, per_node: int) -> None:
    load = skewed(seed, ranks, 64, per_node=per_node, slots=1)
    transport = Transport(9.0, 1.0, 20, 1)
    flow_RR = transport_flow(load, transport)
    np.testing.assert_allclose(flow_RR, plain_flow(load, transport), rtol=1e-9)
    spare_R = np.maximum(load.loads_R.mean() - load.loads_R, 0)
    np.testing.assert_allclose(flow_RR.sum(axis=0), spare_R, atol=1e-6)


def solve(load: InstanceLoad, transport: Transport) -> Array:
    """`[P, 3]` expert, rank and tokens."""
    replicas_3P = np.zeros((3, len(load.loads_R) * load.slots), np.int64)
    flow_RR = transport_flow(load, transport)
    order = np.argsort(-flow_RR, axis=None, kind="stable")
    count = match_replicas(load, flow_RR, order, transport, replicas_3P)
    return replicas_3P[:, :count].T


@pytest.mark.parametrize("seed", range(5))
def test_with_many_slots_no_more_tokens_cross_nodes_than_nodes_exceed_their_mean(seed: int) -> None:
    """All ranks get the mean, and only the excess of whole nodes leaves them, up to two percent of the tokens."""
    load = skewed(seed, 16, 64, per_node=4, slots=16)
    replicas_P3 = solve(load, Transport(9.0, 1.0, 20, 1))
    assert loads_after(load, replicas_P3).max() <= np.ceil(load.loads_R.mean())
    homes_P = load.home_E[replicas_P3[:, 0]]
    crossing = replicas_P3[homes_P // 4 != replicas_P3[:, 1] // 4, 2].sum()
    node_excess = np.maximum(load.loads_R.reshape(4, 4).sum(axis=1) - 4 * load.loads_R.mean(), 0).sum()
    assert node_excess <= crossing + 1
    assert crossing <= node_excess + 0.02 * load.loads_R.sum()


@pytest.mark.parametrize(("slots", "most"), [(1, 1.25), (2, 1.06), (4, 1.02)])
def test_ranks_come_near_the_mean(slots: int, most: float) -> None:
    loads = [skewed(seed, 16, 128, per_node=8, slots=slots) for seed in range(5)]
    after = [loads_after(load, solve(load, Transport(9.0, 1.0, 20, 128))).max() / load.loads_R.mean() for load in loads]
    assert np.mean(after) < most


@pytest.mark.parametrize(
    ("tokens", "replicas"),
    [([2, 12, 20, 6], [[2, 3, 4], [2, 0, 6], [1, 0, 2]]), ([2, 8, 24, 6], [[2, 3, 4], [2, 0, 8], [2, 1, 2]])],
)
def test_what_the_flow_leaves_goes_to_the_near_rank_first(tokens: list[int], replicas: list[list[int]]) -> None:
    """Rank 2 is above the mean: rank 3 of its node gets the 4 that it lacks, then rank 0, which lacks most."""
    load = InstanceLoad.of(np.array(tokens), np.arange(4), ClusterSpec(4, 2, 2), within_node=False)
    replicas_3P = np.zeros((3, 8), np.int64)
    order = np.arange(16)
    count = match_replicas(load, np.zeros((4, 4)), order, Transport(9.0, 1.0, 20, 1), replicas_3P)
    assert replicas_3P[:, :count].T.tolist() == replicas
