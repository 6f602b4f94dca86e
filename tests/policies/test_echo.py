"""ECHO: copies equal to a plain reference of its planner, tokens split as published, and as a policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import Step, check_policy, random_steps
from trimtab import ClusterSpec
from trimtab.array_type import Array
from trimtab.policies.rivals.echo import Echo, clone_hot_experts, split_in_proportion
from trimtab.policies.rivals.instance_load import InstanceLoad


def plain_copies(counts: list[int], home: list[int], ranks: int, slots: int) -> list[tuple[int, int, int]]:
    """The same planner in plain Python."""
    loads = [sum(c for c, h in zip(counts, home, strict=True) if h == r) for r in range(ranks)]
    mean = sum(loads) // ranks
    room = [max(mean - load, 0) for load in loads]
    spill = [0] * len(counts)
    for rank in range(ranks):
        filled = 0
        for e in sorted((e for e in range(len(counts)) if home[e] == rank), key=lambda e: (counts[e], e)):
            spill[e] = max(filled + counts[e] - mean, 0) - max(filled - mean, 0)
            filled += counts[e]
    by_room = sorted(range(ranks), key=lambda r: (-room[r], r))
    by_spill = sorted(range(len(counts)), key=lambda e: (-spill[e], e))
    copies = []
    if slots == 1:
        queues: list[list[int]] = [[] for _ in range(8)]

        def put(e: int) -> None:
            size = 0 if spill[e] >= mean else min((mean - spill[e]) // max(mean // 7, 1) + 1, 7)
            queues[size].append(e)

        for e in by_spill:
            if spill[e] > 0:
                put(e)
        for rank in by_room:
            queue = next((queue for queue in queues if queue), None)
            if room[rank] == 0 or queue is None:
                break
            e = queue.pop(0)
            tokens = min(spill[e], room[rank])
            copies.append((e, rank, tokens))
            spill[e] -= tokens
            if spill[e] > 0:
                put(e)
    else:
        owner = [e for e in by_spill for _ in range(spill[e])]
        for rank in by_room:
            mine, owner = owner[: room[rank]], owner[room[rank] :]
            tokens_of = {e: mine.count(e) for e in dict.fromkeys(mine)}
            largest = sorted(tokens_of, key=lambda e: -tokens_of[e])[:slots]
            copies += [(e, rank, tokens_of[e]) for e in largest]
    return sorted(copies)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 6), st.integers(0, 4), st.sampled_from([3, 30, 400]))
def test_copies_equal_those_of_a_plain_planner(seed: int, ranks: int, per_rank: int, slots: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    experts = ranks * per_rank
    counts_E = rng.integers(0, most, experts) * (rng.random(experts) < 0.7)
    home_E = rng.permutation(np.arange(experts) % ranks)
    load = InstanceLoad.of(counts_E, home_E, ClusterSpec(ranks, ranks, slots), within_node=False)
    copies = [tuple(copy) for copy in clone_hot_experts(load).tolist()]
    assert copies == plain_copies(counts_E.tolist(), home_E.tolist(), ranks, slots)


def test_the_largest_experts_spill_what_exceeds_the_mean() -> None:
    """Rank 0 has 60 and 100 of a mean of 80: the smaller stays, 80 of the larger leave, to the only rank with room."""
    load = InstanceLoad.of(np.array([100, 60, 0, 0]), np.array([0, 0, 1, 1]), ClusterSpec(2, 2, 2), within_node=False)
    assert clone_hot_experts(load).tolist() == [[0, 1, 80]]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8))
def test_every_source_sends_the_same_fraction_up_to_rounding(seed: int, ranks: int) -> None:
    """Copies get all of their tokens, no source sends more than it has, and at least its rounded-down fraction."""
    rng = np.random.default_rng(seed)
    counts_RE = rng.integers(0, 50, (ranks, 6))
    copies = []
    for e in range(6):
        left = int(counts_RE[:, e].sum())
        for rank in np.flatnonzero(rng.random(ranks) < 0.6):
            tokens = int(rng.integers(0, left + 1))
            copies.append((e, int(rank), tokens))
            left -= tokens
    copies_P3 = np.array(copies, np.int64).reshape(-1, 3)
    quotas_PR = split_in_proportion(counts_RE, copies_P3)
    assert np.array_equal(quotas_PR.sum(axis=1), copies_P3[:, 2])
    for e in range(6):
        assert np.all(quotas_PR[copies_P3[:, 0] == e].sum(axis=0) <= counts_RE[:, e])
    for (e, _, tokens), quotas_R in zip(copies, quotas_PR, strict=True):
        assert np.all(quotas_R >= counts_RE[:, e] * tokens // max(counts_RE[:, e].sum(), 1))


def test_rounded_off_tokens_are_filled_up_source_by_source() -> None:
    counts_RE = np.array([[3], [3], [3]])
    assert split_in_proportion(counts_RE, np.array([[0, 1, 4], [0, 2, 2]])).tolist() == [[2, 1, 1], [1, 1, 0]]


def loads_after(load: InstanceLoad) -> Array:
    loads_R = load.loads_R.copy()
    copies_P3 = clone_hot_experts(load)
    np.subtract.at(loads_R, load.home_E[copies_P3[:, 0]], copies_P3[:, 2])
    np.add.at(loads_R, copies_P3[:, 1], copies_P3[:, 2])
    return loads_R


@pytest.mark.parametrize(("slots", "most"), [(1, 1.25), (2, 1.15), (4, 1.02)])
def test_ranks_come_near_the_mean(slots: int, most: float) -> None:
    before, after = [], []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        popularity_E = rng.permutation(np.arange(1, 129) ** -0.8)
        counts_E = rng.multinomial(8 * 8192, popularity_E / popularity_E.sum())
        load = InstanceLoad.of(counts_E, np.arange(128) // 16, ClusterSpec(8, 8, slots), within_node=False)
        before.append(load.loads_R.max() / load.loads_R.mean())
        after.append(loads_after(load).max() / load.loads_R.mean())
    assert np.mean(before) > 1.4
    assert np.mean(after) < most


@settings(max_examples=50, deadline=None)
@given(random_steps())
def test_plans_are_valid_and_no_rank_gets_busier(step: Step) -> None:
    plans = check_policy(Echo(), step)
    assert plans["own"].hash == plans["equal"].hash
    workload = step.known_workload()
    before = workload.home_loads(step.placement.home).max(axis=-1)
    assert np.all(plans["own"].rank_loads(workload).max(axis=-1) <= before)
