"""MoonEP: tokens equal to those of a plain planner, exactly even ranks, and as a policy."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from helpers.policies import Step, check_policy, random_loads, random_step, random_steps
from trimtab.array_type import Array
from trimtab.planner.replicas.whole_experts import InstanceLoad
from trimtab.policies.rivals.moonep import MoonEp, fill_exactly


def plain(counts: list[int], home: list[int], ranks: int, domain: int, slots: int) -> dict[tuple[int, int], int]:
    """The same planner in plain Python: tokens of (expert, rank)."""
    tokens = {(e, home[e]): counts[e] for e in range(len(counts))}
    quotas: dict[tuple[int, int], int] = {}
    for first in range(0, ranks, domain):
        members = list(range(first, first + domain))
        total = sum(count for e, count in enumerate(counts) if home[e] in members)
        above = {r: -(total // domain) - (i < total % domain) for i, r in enumerate(members)}
        for e, count in enumerate(counts):
            if home[e] in above:
                above[home[e]] += count
        while max(above.values()) > 0:
            giver = max(members, key=lambda r: (above[r], -r))
            taker = min(members, key=lambda r: (above[r], r))
            quotas[giver, taker] = -above[taker]
            above[giver] += above[taker]
            above[taker] = 0
    used = dict.fromkeys(range(ranks), 0)
    for giver in range(ranks):
        while any(quota > 0 for (g, _), quota in quotas.items() if g == giver):
            _, taker = max((key for key in quotas if key[0] == giver), key=lambda key: (quotas[key], -key[1]))
            if used[taker] == slots:
                quotas[giver, taker] = 0
                continue
            expert = max((e for e in range(len(counts)) if home[e] == giver), key=lambda e: (tokens[e, giver], -e))
            moved = min(tokens[expert, giver], quotas[giver, taker])
            tokens[expert, taker] = tokens.get((expert, taker), 0) + moved
            tokens[expert, giver] -= moved
            quotas[giver, taker] -= moved
            used[taker] += 1
    return {place: count for place, count in tokens.items() if count > 0}


def fill(load: InstanceLoad) -> Array:
    tokens_ER: Array = fill_exactly(load)
    return tokens_ER


@settings(max_examples=200)
@given(random_loads([(1, 1), (3, 3), (4, 2), (8, 8), (6, 3), (8, 4), (64, 64)], within_node=True, most_slots=6))
def test_tokens_equal_those_of_a_plain_planner(load: InstanceLoad) -> None:
    sizes = len(load.loads_R), load.ranks_per_domain, load.slots
    tokens_ER = fill(load)
    expected = plain(load.counts_E.tolist(), load.home_E.tolist(), *sizes)
    assert {(int(e), int(r)): int(tokens_ER[e, r]) for e, r in np.argwhere(tokens_ER)} == expected


@settings(max_examples=50)
@given(random_steps())
def test_plans_are_valid_and_nodes_are_even(step: Step) -> None:
    """Ranks of a node differ by a token; on equal terms the mean of all is the limit that slots allow."""
    plans = check_policy(MoonEp(), step)
    nodes = plans["own"].rank_loads(step.known_workload())
    nodes = nodes.reshape(*nodes.shape[:2], -1, step.cluster.ranks_per_node)
    assert np.all(nodes.max(axis=-1) - nodes.min(axis=-1) <= 1)
    most = max(np.bincount(home_E).max() for home_E in step.placement.home)
    assert plans["own"].slots_per_rank == most


def test_ranks_get_ranges_of_tokens_in_source_order() -> None:
    """Expert 0, 8 tokens of each of two sources: rank 0 keeps the first 12, rank 1 gets the last 4 of source 1."""
    rng = np.random.default_rng(0)
    step = random_step(rng, ranks=2, experts=2, layers=1, micro_steps=1, sequences=2, contiguous=True)
    step.sequences.counts_SLE[:, 0] = [[8, 4], [8, 4]]
    step.schedule.rank[:] = [0, 1]
    plan = step.plan(MoonEp())
    assert plan.replica_experts.tolist() == [0]
    assert plan.quota_sources.tolist() == [1]
    assert plan.quota_tokens.tolist() == [4]
