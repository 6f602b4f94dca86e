"""Choices of live calls: valid for any counts, and as a plain implementation makes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec
from trimtab.planner import PlanSettings
from trimtab.runtime.live.balancer import LiveBalancer, choose_moves, choose_quotas
from trimtab.runtime.program.physical_experts import InstanceReplicas
from trimtab.runtime.state.expert_places import ExpertPlaces


class Load:
    """Random counts under contiguous homes, a few experts hot."""

    def __init__(self, seed: int, ranks: int, per_rank: int, nodes: int, slots: int) -> None:
        rng = np.random.default_rng(seed)
        self.ranks, self.per_node = ranks * nodes, ranks
        experts = self.ranks * per_rank
        popularity_E = rng.zipf(1.5, experts).clip(max=200)
        self.counts_RE = rng.integers(0, popularity_E + 1, (self.ranks, experts))
        self.home_E = np.repeat(np.arange(self.ranks), per_rank).astype(np.int16)
        self.rows_E = np.tile(np.arange(per_rank), self.ranks)
        self.limits = PlanSettings().limits(ClusterSpec(self.ranks, ranks, slots))._replace(smallest_share=1)
        self.dynamic_E = rng.random(experts) < 0.7

    def loads_R(self, replicas: InstanceReplicas) -> Array:
        loads_R = np.bincount(self.home_E, self.counts_RE.sum(axis=0), self.ranks).astype(np.int64)
        tokens_P = replicas.quotas_PR.sum(axis=1)
        np.subtract.at(loads_R, self.home_E[replicas.experts], tokens_P)
        np.add.at(loads_R, replicas.ranks, tokens_P)
        return loads_R

    def check(self, replicas: InstanceReplicas) -> None:
        """Slots, homes and quotas fit, and the busiest rank has no more than without replicas."""
        assert self.loads_R(replicas).max() <= self.loads_R(InstanceReplicas.none(self.ranks)).max()
        assert (np.bincount(replicas.ranks, minlength=self.ranks) <= self.limits.slots).all()
        assert (self.home_E[replicas.experts] != replicas.ranks).all()
        assert (replicas.quotas_PR >= 0).all()
        used_RE = np.zeros_like(self.counts_RE)
        np.add.at(used_RE.T, replicas.experts, replicas.quotas_PR)
        assert (used_RE <= self.counts_RE).all()
        for rank in range(self.ranks):
            assert replicas.slots[replicas.ranks == rank].tolist() == [*range(int((replicas.ranks == rank).sum()))]


loads = st.builds(
    Load, st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 6), st.integers(1, 2), st.integers(1, 4)
)


@given(loads)
@settings(max_examples=100)
def test_quotas_are_valid_and_level_the_load(load: Load) -> None:
    load.check(choose_quotas(load.counts_RE, load.home_E, load.limits))


def plain_moves(load: Load) -> list[tuple[int, int]]:
    """Of each node the busiest rank gives its largest dynamic expert that helps to the emptiest rank with room."""
    counts_E, may_move = load.counts_RE.sum(axis=0), load.dynamic_E & (load.counts_RE.sum(axis=0) > 0)
    loads_R = load.loads_R(InstanceReplicas.none(load.ranks)).tolist()
    room, moves = [load.limits.slots] * load.ranks, []
    for first in range(0, load.ranks, load.per_node):
        node = range(first, first + load.per_node)
        while True:
            giver = max(node, key=lambda rank: loads_R[rank])
            takers = [rank for rank in node if room[rank]]
            if not takers:
                break
            taker = min(takers, key=lambda rank: loads_R[rank])
            helping = [
                e for e in np.flatnonzero(may_move & (load.home_E == giver)).tolist()
                if loads_R[taker] + counts_E[e] < loads_R[giver]
            ]  # fmt: skip
            if not helping:
                break
            chosen = max(helping, key=lambda e: counts_E[e])
            may_move[chosen] = False
            loads_R[giver] -= counts_E[chosen]
            loads_R[taker] += counts_E[chosen]
            room[taker] -= 1
            moves.append((chosen, taker))
    return moves


@given(loads)
@settings(max_examples=100)
def test_moves_are_those_of_the_published_greedy(load: Load) -> None:
    replicas = choose_moves(load.counts_RE, load.home_E, load.rows_E, load.dynamic_E, load.limits)
    load.check(replicas)
    assert sorted(zip(replicas.experts.tolist(), replicas.ranks.tolist(), strict=True)) == sorted(plain_moves(load))
    # Whole experts, in the order in which their rows arrive.
    assert np.array_equal(replicas.quotas_PR, load.counts_RE.T[replicas.experts])
    homes = load.home_E[replicas.experts]
    arrivals = [*zip(replicas.ranks.tolist(), homes.tolist(), load.rows_E[replicas.experts].tolist(), strict=True)]
    assert arrivals == sorted(arrivals)


def balancer_of(policy: Any, layers: int = 1) -> tuple[LiveBalancer, Load]:
    load = Load(0, 4, 4, 1, 2)
    places = ExpertPlaces(load.home_E, load.rows_E)
    homes: Any = SimpleNamespace(num_experts=len(load.home_E), places=places)
    return LiveBalancer(policy, [homes] * layers, load.limits), load


def test_a_call_has_replicas_of_its_own_layer_alone() -> None:
    balancer, load = balancer_of("quota", layers=2)
    call = balancer.choose(0, load.counts_RE)
    assert balancer.count(call.number, 1) == 0
    assert balancer.of(call.number, 0) is call.replicas
    assert balancer.count(call.number + 1, 0) == 0


def test_feplb_moves_only_experts_that_were_hot_before() -> None:
    """With two slots, two experts of a rank may move: its first ones at first, then those with most rows before."""
    balancer, load = balancer_of("feplb")

    def moved(*hot_experts: int) -> set[int]:
        counts_RE = np.ones_like(load.counts_RE)
        counts_RE[:, hot_experts] = 100
        return {*balancer.choose(0, counts_RE).replicas.experts.tolist()} & {*hot_experts}

    # Rank 0 is home to experts 0 to 3.
    assert moved(2, 3) == set()
    assert len(moved(2, 3)) == 1
    assert moved(0, 1) == set()
    assert len(moved(0, 1)) == 1
