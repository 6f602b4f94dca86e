"""Bounds hold for every plan and are met in small cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from benchmarks.plan_bounds import fewest_replicas, gap_to_bound, load_bound
from helpers.planner_steps import Instance, Replicas, instances, random_homes, random_instance
from helpers.random_plans import random_schedule
from trimtab import ClusterSpec, Placement, StepPlan, Workload


def bound(instance: Instance) -> float:
    return load_bound(instance.counts_E, instance.home_E, instance.ranks, instance.slots, instance.fixed_R)


@settings(max_examples=60)
@given(instances())
def test_no_planned_load_is_below_the_bound(instance: Instance) -> None:
    loads_R = instance.loads(instance.replicas())
    assert bound(instance) <= loads_R.max() * (1 + 1e-7)
    assert bound(instance) >= loads_R.sum() / instance.ranks * (1 - 1e-7)


@pytest.mark.parametrize(
    ("counts", "home", "ranks", "slots", "least"),
    [
        ([10, 2], [0, 1], 2, 0, 10),  # no slots: the homes' loads
        ([10, 2], [0, 0], 1, 3, 12),  # one rank computes all
        ([0, 0], [0, 1], 2, 1, 0),  # nothing to do
        ([10, 2], [0, 1], 2, 1, 6),  # one copy makes both ranks even
        ([12, 0, 0], [0, 1, 2], 3, 1, 4),  # two copies of one expert
        ([9, 9, 0, 0], [0, 0, 1, 1], 2, 1, 9),  # one expert moves whole, or both by half a slot
        ([4] * 4 + [0] * 4, [0] * 4 + [1] * 4, 2, 1, 12),  # one slot takes one expert of four, whole
        ([4] * 4 + [0] * 4, [0] * 4 + [1] * 4, 2, 2, 8),  # two slots take two
        ([6, 6, 6, 0, 0, 0], [0, 0, 0, 1, 1, 1], 2, 1, 12),  # even would be 9, but a slot takes six
    ],
)
def test_the_bound_is_the_optimum_of_small_cases(
    counts: list[int], home: list[int], ranks: int, slots: int, least: int
) -> None:
    assert load_bound(np.array(counts), np.array(home), ranks, slots) == pytest.approx(least)


@pytest.mark.parametrize(
    ("slots", "moved", "sampled", "gap"),
    [
        (0, 0, 2, 0.0),  # no slots: nothing can be better than the homes
        (1, 0, 2, (90 / 50 + 60 / 40) / 2 - 1),
        (1, 0, 1, 90 / 50 - 1),  # the first instance alone
        (1, 30, 2, (60 / 50 + 60 / 40) / 2 - 1),
    ],
)
def test_the_gap_is_to_the_bound_of_the_plan_s_slots(slots: int, moved: int, sampled: int, gap: float) -> None:
    """Two micro-steps with 90 and 10, then 60 and 20 tokens of the two ranks' experts; `moved` of the 90 go over."""
    workload = Workload.known(np.array([[[[90, 10], [0, 0]]], [[[60, 20], [0, 0]]]], np.int32))
    nothing = np.empty((0, 2), np.int64)
    plan = StepPlan.from_instances(
        random_schedule(np.random.default_rng(0), 0, num_ranks=2, num_micro_steps=2),
        Placement.contiguous(1, 2, 2),
        [np.array([[0, 1]]) if moved else nothing, nothing],
        [np.array([[moved, 0]]) if moved else nothing, nothing],
        mixed_ML=workload.mixed_ML,
        cluster=ClusterSpec(2, 2, slots),
    )
    plan.check(workload)
    assert gap_to_bound(plan, workload, sampled) == pytest.approx(gap)


def plans_of(instance: Instance, count: int) -> Iterator[Replicas]:
    """All replicas of an instance, `count` of them, each with any number of tokens of its expert but none."""
    away = [(e, r) for e, r in np.ndindex(len(instance.counts_E), instance.ranks) if instance.home_E[e] != r]
    for pairs in itertools.combinations(away, count):
        ranks = [rank for _, rank in pairs]
        if any(ranks.count(rank) > instance.slots for rank in ranks):
            continue
        for tokens in itertools.product(*(range(1, int(instance.counts_E[expert]) + 1) for expert, _ in pairs)):
            left_E = instance.counts_E.copy()
            np.subtract.at(left_E, [expert for expert, _ in pairs], tokens)
            if left_E.min() >= 0:
                yield [(expert, rank, moved) for (expert, rank), moved in zip(pairs, tokens, strict=True)]


def tiny_instance(seed: int) -> Instance:
    """Three ranks, six experts, up to 20 tokens."""
    rng = np.random.default_rng(seed)
    counts_RE = np.zeros((3, 6), np.int32)
    counts_RE[0] = rng.multinomial(rng.integers(6, 20), rng.dirichlet(np.full(6, 0.4)))
    home_E = random_homes(rng, 1, 6, 3).home[0]
    threshold_load = int(-(-counts_RE.sum() // 3)) + int(rng.integers(0, 2))
    return Instance(counts_RE, np.zeros(3, np.int64), home_E, 3, 1, threshold_load, 1)


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_and_the_fewest_are_those_of_trying_everything(seed: int) -> None:
    """Up to three replicas, the most that three slots hold, so that nothing is left out. The planner's are as good."""
    instance = tiny_instance(seed)
    for smallest in (1, 2):
        fewest, lowest = None, int(instance.loads([]).max())
        for count in range(4):
            for replicas in plans_of(instance, count):
                highest = int(instance.loads(replicas).max())
                lowest = min(lowest, highest)
                if fewest is None and highest <= instance.threshold_load and all(t >= smallest for *_, t in replicas):
                    fewest = count
        assert bound(instance) <= lowest + 1e-6
        assert fewest == fewest_replicas(
            instance.counts_E, instance.home_E, 3, 1, instance.threshold_load, smallest, candidates=6
        )
        planned = replace(instance, smallest_share=smallest).replicas()
        highest = int(instance.loads(planned).max())
        assert highest <= max(lowest, instance.threshold_load)
        if fewest is not None:
            assert len(planned) == fewest


def test_a_few_candidates_lose_nothing_in_small_cases() -> None:
    for seed in range(10):
        instance = random_instance(
            np.random.default_rng(seed), ranks=3, experts_per_rank=4, per_node=3, slots=1, tokens=300, threshold=1.1,
            smallest_share=10,
        )  # fmt: skip
        case = (instance.counts_E, instance.home_E, 3, 1, instance.threshold_load, 10)
        assert fewest_replicas(*case, candidates=2) == fewest_replicas(*case, candidates=4)
