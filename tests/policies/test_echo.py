"""ECHO: copies equal to a plain reference of its planner, tokens split as published, and as a policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import loads_after, random_loads, skewed_load
from trimtab.planner.replicas.whole_experts import InstanceLoad
from trimtab.policies.rivals.echo import clone_hot_experts, split_in_proportion


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


@settings(max_examples=200)
@given(random_loads([(ranks, ranks) for ranks in range(1, 9)], within_node=False))
def test_copies_equal_those_of_a_plain_planner(load: InstanceLoad) -> None:
    copies = [tuple(copy) for copy in clone_hot_experts(load).tolist()]
    assert copies == plain_copies(load.counts_E.tolist(), load.home_E.tolist(), len(load.loads_R), load.slots)


@settings(max_examples=100)
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


@pytest.mark.parametrize(("slots", "most"), [(1, 1.25), (2, 1.15), (4, 1.02)])
def test_ranks_come_near_the_mean(slots: int, most: float) -> None:
    loads = [skewed_load(seed, 8, 128, zipf=0.8, tokens=8192, slots=slots) for seed in range(5)]
    assert np.mean([load.loads_R.max() / load.loads_R.mean() for load in loads]) > 1.4
    after = [loads_after(load, clone_hot_experts(load)).max() / load.loads_R.mean() for load in loads]
    assert np.mean(after) < most
