"""Replicas near the tokens that use them: what must hold, and how even shifts make loads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.planner_reference import loads
from helpers.planner_steps import Replicas, check_replicas, listed, random_homes, shares_of
from trimtab import ClusterSpec
from trimtab.array_type import Array
from trimtab.planner import PlanSettings
from trimtab.planner.replicas.kernel_values import Homes, InstanceRows, Limits, Placing, Prices
from trimtab.planner.replicas.local_replicas import place_local_replicas, shift_shares

SWEEPS = np.int64(8)


@dataclass(frozen=True, eq=False)
class Case:
    """An instance by source node."""

    counts_NE: Array
    fixed_R: Array
    home_E: Array
    limits: Limits
    target: int

    @property
    def instance(self) -> InstanceRows:
        return InstanceRows(self.counts_NE.sum(axis=0), self.fixed_R, Homes.of(self.home_E, len(self.fixed_R)))

    @property
    def node_R(self) -> Array:
        return np.arange(len(self.fixed_R)) // self.limits.ranks_per_node

    def local(self) -> Replicas:
        """Of `place_local_replicas`."""
        return listed(*place_local_replicas(self.instance, self.counts_NE, self.limits, self.target))

    def loads(self, replicas: Replicas) -> Array:
        return loads(self.counts_NE.sum(axis=0), self.home_E, replicas, self.fixed_R)

    def at_home(self, replicas: Replicas) -> Array:
        at_home_E = self.counts_NE.sum(axis=0)
        for expert, _, tokens in replicas:
            at_home_E[expert] -= tokens
        return at_home_E

    def check(self, replicas: Replicas) -> None:
        check_replicas(replicas, self.counts_NE.sum(axis=0), self.home_E, self.limits)


def random_case(
    rng: np.random.Generator, *, nodes: int, per_node: int, slots: int, experts_per_rank: int, tokens: int,
    smallest: int, prices: Prices | None = None, unknown: bool = False, skew: float = 1.5,
) -> Case:  # fmt: skip
    """Every node has its own taste, and some experts are hot everywhere."""
    ranks = nodes * per_node
    experts = ranks * experts_per_rank
    hot_E = rng.gumbel(size=experts) * rng.uniform(0, skew)
    weights_NE = np.exp(hot_E + rng.gumbel(size=(nodes, experts)) * rng.uniform(0, skew))
    counts_NE = np.stack([rng.multinomial(tokens * per_node, row / row.sum()) for row in weights_NE]).astype(np.int64)
    fixed_R = rng.integers(0, tokens // 2 + 1, ranks) if unknown else np.zeros(ranks, np.int64)
    if prices is None:
        prices = Prices(*(int(rng.choice([1, 1000, 30_000])) for _ in range(3)), *rng.integers(0, 10**6, 2).tolist())
    limits = PlanSettings(smallest_share=smallest).limits(ClusterSpec(ranks, per_node, slots), prices)
    target = int((counts_NE.sum() + fixed_R.sum()) * rng.choice([1.0, 1.005, 1.1]) // ranks)
    limits = limits._replace(sends=int(rng.choice([1, slots, 1 << 40])))
    return Case(counts_NE, fixed_R, random_homes(rng, 1, experts, ranks).home[0], limits, target)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Two to four nodes of one to four ranks."""
    return random_case(
        np.random.default_rng(draw(st.integers(0, 2**32))), nodes=draw(st.integers(2, 4)),
        per_node=draw(st.integers(1, 4)), slots=draw(st.integers(1, 3)), experts_per_rank=draw(st.integers(1, 4)),
        tokens=draw(st.sampled_from([0, 10, 300, 4000])), smallest=draw(st.sampled_from([1, 8, 128])),
        unknown=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def any_replicas(draw: st.DrawFn) -> tuple[Case, Replicas]:
    """A case with any replicas that are allowed, those of an expert's whole tokens among them."""
    case = draw(cases())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    smallest, ranks = case.limits.smallest_share, len(case.fixed_R)
    left_E, free = case.counts_NE.sum(axis=0), [case.limits.slots] * ranks
    replicas: Replicas = []
    for expert, rank in rng.permutation([(e, r) for e in range(len(left_E)) for r in range(ranks)]).tolist():
        most = left_E[expert] - smallest
        if case.home_E[expert] == rank or not free[rank] or most < smallest or rng.random() < 0.5:
            continue
        tokens = int(left_E[expert]) if rng.random() < 0.2 else int(rng.integers(smallest, most + 1))
        left_E[expert] -= tokens
        free[rank] -= 1
        replicas.append((expert, rank, tokens))
    return case, replicas


def placing_of(case: Case, replicas: Replicas) -> Placing:
    """The state of a search with these replicas."""
    return Placing(case.counts_NE, case.loads(replicas), case.at_home(replicas), shares_of(replicas))


def assert_consistent(case: Case, placing: Placing, replicas: Replicas) -> None:
    """Loads and tokens at home are those of the shares."""
    assert placing.loads_R.tolist() == case.loads(replicas).tolist()
    assert placing.at_home_E.tolist() == case.at_home(replicas).tolist()
    assert placing.at_home_E.min() >= 0


@settings(max_examples=200)
@given(cases())
def test_local_replicas_are_allowed(case: Case) -> None:
    replicas = case.local()
    case.check(replicas)
    sent = Counter(int(case.home_E[expert]) for expert, _, _ in replicas)
    assert all(count <= case.limits.sends for count in sent.values())
    # A node has one copy of an expert, and another node the home.
    places = [(expert, int(case.node_R[rank])) for expert, rank, _ in replicas]
    assert len(set(places)) == len(places)
    assert all(case.node_R[case.home_E[expert]] != node for expert, node in places)


@settings(max_examples=200)
@given(any_replicas(), st.floats(0.5, 2))
def test_shifts_keep_shares_and_never_raise_the_largest_load_above_the_target(
    given_case: tuple[Case, Replicas], part: float
) -> None:
    case, replicas = given_case
    case.check(replicas)
    placing, target = placing_of(case, replicas), int(case.target * part)
    shift_shares(placing, np.int64(len(replicas)), case.home_E, case.limits, target, SWEEPS)
    after = listed(placing.found, len(replicas))
    assert [replica[:2] for replica in after] == [replica[:2] for replica in replicas]
    case.check(after)
    assert_consistent(case, placing, after)
    assert placing.loads_R.max() <= max(case.loads(replicas).max(), target)


def test_shifts_even_out_loads() -> None:
    """Skewed experts, two slots a rank: the largest load falls by most of what it is above the mean."""
    above = []
    for seed in range(20):
        case = random_case(
            np.random.default_rng(seed), nodes=4, per_node=4, slots=2, experts_per_rank=4, tokens=20_000, smallest=32,
            prices=Prices(1000, 1, 1000, 0, 0), skew=0.8,
        )  # fmt: skip
        case = replace(case, limits=case.limits._replace(sends=1 << 40))
        mean = case.counts_NE.sum() / 16
        before, after = case.loads([]).max() / mean - 1, case.loads(case.local()).max() / mean - 1
        above.append((before, after))
    before, after = np.mean(above, axis=0)
    assert before > 1
    assert after < 0.15 * before


@settings(max_examples=50)
@given(cases())
def test_a_node_s_own_tokens_stay_where_loads_allow(case: Case) -> None:
    """Without a target for loads, every copy computes its node's tokens, but for what has to stay at home."""
    assume(case.counts_NE.sum() > 0)
    limits = case.limits._replace(prices=case.limits.prices._replace(computed_row=0, near_replica=0, far_replica=0))
    found, count = place_local_replicas(case.instance, case.counts_NE, limits, np.int64(1) << 40)
    left_E = case.counts_NE.sum(axis=0) - limits.smallest_share
    for expert, rank, tokens in listed(found, count):
        assert tokens == min(case.counts_NE[case.node_R[rank], expert], left_E[expert])
        left_E[expert] -= tokens
