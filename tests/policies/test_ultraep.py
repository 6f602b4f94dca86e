"""UltraEP: quotas equal to a plain reference, published figures, and as a policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import loads_after, off_node, random_loads, random_step, skewed_load
from helpers.ultraep_reference import solve_domains
from trimtab import ClusterSpec
from trimtab.array_type import Array
from trimtab.planner.plan.workload import max_over_mean
from trimtab.planner.replicas.whole_experts import InstanceLoad
from trimtab.policies.rivals.ultraep import Search, UltraEp, heaviest_first, solve_quotas

PUBLISHED = Search(1.0, 1024, 0.01, 3)
SIZES = [(1, 1), (3, 3), (4, 2), (8, 2), (6, 3), (8, 4)]


def solve(load: InstanceLoad, search: Search = PUBLISHED) -> list[tuple[int, int, int]]:
    replicas_3P = np.zeros((3, len(load.loads_R) * load.slots), np.int64)
    count = solve_quotas(load, heaviest_first(load), search, replicas_3P)
    return [(int(e), int(r), int(tokens)) for e, r, tokens in replicas_3P[:, :count].T]


@settings(max_examples=200)
@given(
    st.booleans().flatmap(lambda within_node: random_loads(SIZES, within_node=within_node, most_slots=3)),
    st.sampled_from([1.0, 1.05, 1.5]),
    st.sampled_from([1, 30, 1024]),
    st.integers(0, 3),
)
def test_quotas_equal_those_of_a_plain_solver(load: InstanceLoad, threshold: float, smallest: int, tries: int) -> None:
    search = Search(threshold, smallest, 0.01, tries)
    assert solve(load, search) == [quota for solved in solve_domains(load, search) for quota in solved.quotas]


def heavy_tailed(rng: np.random.Generator, ranks: int, experts: int, slots: int, tokens: int) -> InstanceLoad:
    """Counts of experts: Zipf, log-normal, or nearly all tokens in a few of them; one domain in one node."""
    kind = rng.integers(3)
    if kind == 0:
        popularity_E = rng.permutation(np.arange(1, experts + 1) ** -rng.uniform(0.3, 2.0))
    elif kind == 1:
        popularity_E = np.exp(rng.normal(0, rng.uniform(0.5, 2.5), experts))
    else:
        popularity_E = np.full(experts, 0.05 / experts)
        popularity_E[rng.choice(experts, rng.integers(1, 17), replace=False)] += 0.95
    counts_E: Array = rng.multinomial(tokens, popularity_E / popularity_E.sum())
    home_E = np.arange(experts) * ranks // experts
    return InstanceLoad.of(counts_E, home_E, ClusterSpec(ranks, ranks, slots), within_node=False)


@pytest.mark.parametrize("ranks", [8, 16, 32, 64])
@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_quotas_equal_those_of_the_public_kernel(ranks: int, slots: int) -> None:
    """Equal replicas, in their order, on heavy tails, some of them after a search."""
    rng = np.random.default_rng((ranks, slots))
    searched = 0
    for _ in range(12):
        experts = int(rng.choice([e for e in (64, 128, 256) if e >= ranks]))
        load = heavy_tailed(rng, ranks, experts, slots, int(ranks * rng.choice([1024, 8192, 65536])))
        (expected,) = solve_domains(load, PUBLISHED)
        assert solve(load) == expected.quotas
        searched += expected.searched
    assert searched or slots > 1


@pytest.mark.parametrize(("ranks", "experts", "zipf"), [(8, 128, 0.6), (16, 128, 0.5), (64, 256, 0.4), (64, 256, 0.55)])
def test_published_balance(ranks: int, experts: int, zipf: float) -> None:
    """Rank max/mean 1.30-4.01 before and 1.01-1.04 after, with two slots a rank in one domain."""
    loads = [skewed_load(seed, ranks, experts, zipf=zipf, tokens=65_536, per_node=ranks) for seed in range(5)]
    assert 1.2 < np.mean([load.loads_R.max() / load.loads_R.mean() for load in loads]) < 4.01
    assert np.mean([loads_after(load, solve(load)).max() / load.loads_R.mean() for load in loads]) <= 1.04


def test_replicas_may_leave_their_node_only_on_equal_terms() -> None:
    """A node that is busy as a whole: its own recipe can't help, equal terms can."""
    step = random_step(np.random.default_rng(0), ranks=8, experts=32, ranks_per_node=2, contiguous=True)
    step.sequences.counts_SLE[:, :, :8] *= 20
    own, equal = (step.plan(UltraEp(smallest_quota=128), equal_terms=terms) for terms in (False, True))
    assert not off_node(own).any()
    assert off_node(equal).any()
    workload = step.workload()
    assert max_over_mean(equal.rank_loads(workload)).mean() < max_over_mean(own.rank_loads(workload)).mean()
