"""Replicas of an instance: those of the plain reference, and what must hold however they are found."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings

from helpers import planner_reference as reference
from helpers.planner_steps import Instance, instances, random_instance


def reference_replicas(instance: Instance) -> list[reference.Replica]:
    return reference.place_replicas(
        instance.counts_E, instance.fixed_R, instance.home_E, instance.ranks, instance.per_node, instance.slots,
        instance.threshold_load, instance.smallest_share,
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(instances())
def test_replicas_are_those_of_the_reference(instance: Instance) -> None:
    assert instance.replicas() == reference_replicas(instance)


def test_replicas_are_those_of_the_reference_on_several_nodes() -> None:
    """Nodes of two to four ranks, some of them too full, some exactly full."""
    for seed in range(160):
        rng = np.random.default_rng(seed)
        ranks, per_node = [(4, 2), (6, 2), (6, 3), (8, 2), (8, 4)][seed % 5]
        sizes = {"experts_per_rank": int(rng.integers(1, 5)), "slots": int(rng.integers(1, 3))}
        tokens, threshold = int(rng.choice([3, 10, 500])), float(rng.choice([1.0, 1.1, 1.5]))
        instance = random_instance(
            rng, ranks=ranks, per_node=per_node, tokens=tokens, threshold=threshold, smallest_share=1, **sizes
        )
        assert instance.replicas() == reference_replicas(instance)


def test_replicas_are_those_of_the_reference_where_experts_are_alike() -> None:
    """Every source sends an expert 0, 10 or 20 tokens, so that ties are everywhere."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        instance = random_instance(
            rng, ranks=6, experts_per_rank=4, per_node=6, slots=1, tokens=1, threshold=1.0, smallest_share=1
        )
        counts_RE = np.broadcast_to(10 * rng.integers(0, 3, 24), (6, 24)).astype(np.int32)
        instance = replace(instance, counts_RE=counts_RE, threshold_load=int(counts_RE.sum() * 1.05) // 6)
        assert instance.replicas() == reference_replicas(instance)


@settings(max_examples=150, deadline=None)
@given(instances())
def test_replicas_keep_slots_and_shares_and_never_hurt(instance: Instance) -> None:
    replicas = instance.replicas()
    assert all(count <= instance.slots for count in Counter(rank for _, rank, _ in replicas).values())
    assert len({(expert, rank) for expert, rank, _ in replicas}) == len(replicas)
    assert all(instance.home_E[expert] != rank for expert, rank, _ in replicas)
    assert all(tokens >= instance.smallest_share for _, _, tokens in replicas)
    for expert in {expert for expert, _, _ in replicas}:
        at_home = instance.counts_E[expert] - sum(tokens for e, _, tokens in replicas if e == expert)
        assert at_home == 0 or at_home >= instance.smallest_share
    before, after = instance.loads([]), instance.loads(replicas)
    assert after.min() >= 0
    assert after.max() < before.max() or not replicas
    if before.max() <= instance.threshold_load:
        assert not replicas


def one_hot(ranks: int, per_node: int, hot: list[int], **others: int) -> Instance:
    """One expert a rank, `hot` tokens each."""
    settings = {"slots": 1, "threshold_load": sum(hot) // ranks, "smallest_share": 1} | others
    return Instance(
        np.diag(hot).astype(np.int32), np.zeros(ranks, np.int64), np.arange(ranks, dtype=np.int16), per_node, **settings
    )


def test_one_taker_gets_the_whole_excess() -> None:
    """Best fit: 100 too many go to the rank with room for 100, not to the one with room for 250."""
    instance = one_hot(4, 4, [1100, 900, 750, 1000], threshold_load=1000)
    assert [(expert, rank) for expert, rank, _ in instance.replicas()] == [(0, 1)]


def test_filling_reaches_with_one_slot_what_fitting_cannot() -> None:
    """Ranks 0 and 1 are over by 30 each, 2 and 3 under by 50 and 10: both of 2's tokens can't come in two copies."""
    instance = one_hot(4, 4, [130, 130, 50, 90])
    assert instance.loads(instance.replicas()).max() == 100


def test_a_taker_in_the_node_is_preferred() -> None:
    """Rank 1 and rank 2 have room alike; rank 1 shares the giver's node."""
    assert [rank for _, rank, _ in one_hot(4, 2, [140, 60, 60, 140], threshold_load=100).replicas()] == [1, 2]


def test_shares_of_both_ranks_are_levelled() -> None:
    """The threshold asks for 20 to move; once the copy is there, loads are made equal."""
    assert one_hot(2, 2, [140, 60], threshold_load=120).replicas() == [(0, 1, 40)]


def test_an_expert_is_not_cut_below_the_smallest_share() -> None:
    """Of 140 tokens 30 are too many: at 80 a share, both shares can't be met, so all would move or none."""
    instance = one_hot(2, 2, [140, 60], threshold_load=110, smallest_share=80)
    assert instance.replicas() == []
    assert one_hot(2, 2, [140, 60], threshold_load=110, smallest_share=40).replicas() == [(0, 1, 40)]
