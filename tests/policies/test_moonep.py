"""MoonEP: exactly even ranks, copies within their bound, equal to a plain reference, and as a policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import Step, check_policy, random_step, random_steps
from trimtab import ClusterSpec
from trimtab.array_type import Array
from trimtab.planner.plan.workload import max_over_mean
from trimtab.policies.rivals.instance_load import InstanceLoad
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


def fill(counts_E: Array, home_E: Array, ranks: int, domain: int, slots: int) -> Array:
    cluster = ClusterSpec(ranks, domain, slots)
    tokens_ER: Array = fill_exactly(InstanceLoad.of(counts_E, home_E, cluster, within_node=True))
    return tokens_ER


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([(1, 1), (3, 3), (4, 2), (8, 8), (6, 3), (8, 4)]),
    st.integers(1, 6),
    st.integers(0, 6),
)
def test_tokens_equal_those_of_a_plain_planner(seed: int, sizes: tuple[int, int], per_rank: int, slots: int) -> None:
    ranks, domain = sizes
    rng = np.random.default_rng(seed)
    counts_E = rng.integers(0, rng.choice([2, 100, 5000]), ranks * per_rank) * (rng.random(ranks * per_rank) < 0.8)
    home_E = rng.permutation(np.arange(ranks * per_rank) % ranks)
    tokens_ER = fill(counts_E, home_E, ranks, domain, slots)
    expected = plain(counts_E.tolist(), home_E.tolist(), ranks, domain, slots)
    assert {(int(e), int(r)): int(tokens_ER[e, r]) for e, r in np.argwhere(tokens_ER)} == expected


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([2, 8, 16, 64]), st.integers(1, 16), st.floats(0, 3))
def test_every_rank_gets_exactly_the_mean_with_few_copies(seed: int, ranks: int, per_rank: int, zipf: float) -> None:
    """One home rank fills each rank, from at most R - 1 fillings; copies exceed these only where experts run out."""
    rng = np.random.default_rng(seed)
    experts = ranks * per_rank
    popularity_E = rng.permutation(np.arange(1, experts + 1) ** -zipf)
    counts_E = rng.multinomial(ranks * int(rng.choice([3, 1000, 65536])), popularity_E / popularity_E.sum())
    home_E = np.arange(experts) // per_rank
    tokens_ER = fill(counts_E, home_E, ranks, ranks, per_rank)
    assert np.array_equal(tokens_ER.sum(axis=1), counts_E)
    assert np.all(tokens_ER >= 0)
    assert np.all(tokens_ER.sum(axis=0) == counts_E.sum() // ranks)
    away_ER = tokens_ER.copy()
    away_ER[np.arange(experts), home_E] = 0
    experts_P, ranks_P = np.nonzero(away_ER)
    fillings = set(zip(home_E[experts_P].tolist(), ranks_P.tolist(), strict=True))
    givers = np.unique(home_E[experts_P])
    assert len({rank for _, rank in fillings}) == len(fillings), "a rank is filled by two"
    assert len(fillings) <= ranks - 1
    assert len(experts_P) <= ranks - 1 + len(givers) * (per_rank - 1)
    assert np.bincount(ranks_P, minlength=ranks).max(initial=0) <= per_rank
    used_up = np.sum((counts_E > 0) & (tokens_ER[np.arange(experts), home_E] == 0))
    assert len(experts_P) <= len(fillings) + used_up


def test_a_remainder_goes_to_the_first_ranks() -> None:
    tokens_ER = fill(np.array([11, 0, 0, 0]), np.arange(4), 4, 4, 1)
    assert tokens_ER.tolist() == [[3, 3, 3, 2], [0] * 4, [0] * 4, [0] * 4]


@settings(max_examples=50, deadline=None)
@given(random_steps())
def test_plans_are_valid_and_nodes_are_even(step: Step) -> None:
    """Ranks of a node differ by a token; on equal terms the mean of all is the limit that slots allow."""
    plans = check_policy(MoonEp(), step)
    nodes = plans["own"].rank_loads(step.known_workload())
    nodes = nodes.reshape(*nodes.shape[:2], -1, step.cluster.ranks_per_node)
    assert np.all(nodes.max(axis=-1) - nodes.min(axis=-1) <= 1)
    most = max(np.bincount(home_E).max() for home_E in step.placement.home)
    assert plans["own"].slots_per_rank == most


def test_max_over_mean_is_one_in_one_node() -> None:
    step = random_step(np.random.default_rng(3), ranks=8, experts=128, sequences=64, top_k=8, contiguous=True)
    plan = MoonEp().plan(step.view(MoonEp(), equal_terms=False))
    ratios = max_over_mean(plan.rank_loads(step.workload()))
    assert ratios.max() < 1.0005
    assert max_over_mean(step.workload().home_loads(plan.home)).max() > 1.2
    # One hot expert on each giving rank, and rarely two.
    assert plan.num_replicas / (plan.num_micro_steps * plan.num_layers) == pytest.approx(7, abs=3)


def test_ranks_get_ranges_of_tokens_in_source_order() -> None:
    """Expert 0, 8 tokens of each of two sources: rank 0 keeps the first 12, rank 1 gets the last 4 of source 1."""
    step = random_step(
        np.random.default_rng(0), ranks=2, experts=2, layers=1, micro_steps=1, sequences=2, contiguous=True
    )
    step.sequences.counts_SLE[:, 0] = [[8, 4], [8, 4]]
    step.schedule.rank[:] = [0, 1]
    plan = MoonEp().plan(step.view(MoonEp(), equal_terms=False))
    assert plan.replica_experts.tolist() == [0]
    assert plan.quota_sources.tolist() == [1]
    assert plan.quota_tokens.tolist() == [4]
