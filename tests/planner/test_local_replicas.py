"""Replicas near the tokens that use them: invariants, their cost, and how close shares come to a linear program."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.linear_program import LinearProgram
from helpers.plain_exchanges import PlainExchanges
from helpers.planner_reference import loads
from helpers.planner_steps import Replicas, check_replicas, listed, random_homes, shares_of
from trimtab import ClusterSpec
from trimtab.array_type import Array
from trimtab.planner import PlanSettings
from trimtab.planner.replicas.exchanges import MOST_GIVERS, exchange_replicas
from trimtab.planner.replicas.kernel_values import Homes, InstanceRows, Limits, Placing, Prices, Shares
from trimtab.planner.replicas.local_replicas import (
    cost_of_replicas,
    fill_free_slots,
    place_local_replicas,
    shift_shares,
)
from trimtab.planner.replicas.replica_search import place_replicas

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
    def sources(self) -> tuple[Array, Array]:
        return self.counts_NE, self.counts_NE.sum(axis=1)

    @property
    def node_R(self) -> Array:
        return np.arange(len(self.fixed_R)) // self.limits.ranks_per_node

    def local(self) -> Replicas:
        """Of `place_local_replicas`."""
        return listed(*place_local_replicas(self.instance, self.sources, self.limits, self.target))

    def filled(self) -> Replicas:
        """Of `place_replicas`, and local ones in free slots."""
        found, count = place_replicas(self.instance, self.limits, self.target)
        return listed(*fill_free_slots(self.instance, self.sources, self.limits, self.target, found, np.int64(count)))

    def loads(self, replicas: Replicas) -> Array:
        return loads(self.counts_NE.sum(axis=0), self.home_E, replicas, self.fixed_R)

    def at_home(self, replicas: Replicas) -> Array:
        at_home_E = self.counts_NE.sum(axis=0)
        for expert, _, tokens in replicas:
            at_home_E[expert] -= tokens
        return at_home_E

    def cost(self, replicas: Replicas) -> int:
        """Of the kernel."""
        cost, highest = cost_of_replicas(
            self.instance, self.sources, self.limits, shares_of(replicas), np.int64(len(replicas))
        )
        assert highest == self.loads(replicas).max()
        return int(cost)

    def plain_cost(self, replicas: Replicas) -> int:
        """Node by node and expert by expert."""
        prices, loads_R = self.limits.prices, self.loads(replicas)
        leaving, arriving, computed = Counter[int](), Counter[int](), Counter[tuple[int, int]]()
        copies = [(e, int(self.home_E[e]), int(tokens)) for e, tokens in enumerate(self.at_home(replicas))]
        for expert, rank, tokens in copies + replicas:
            computed[int(self.node_R[rank]), expert] += tokens
        for (node, expert), tokens in np.ndenumerate(self.counts_NE):
            leaving[node] += max(int(tokens) - computed[node, expert], 0)
            arriving[node] += max(computed[node, expert] - int(tokens), 0)
        far_rows = max(*leaving.values(), *arriving.values())
        near_rows = int(loads_R.sum()) // len(loads_R)
        links = max(prices.far_row * far_rows, prices.near_row * near_rows)
        return int(prices.computed_row * int(loads_R.max()) + links + self.transfers(replicas))

    def transfers(self, replicas: Replicas) -> int:
        """Prices of the replicas' transfers."""
        far = sum(int(self.node_R[rank] != self.node_R[self.home_E[expert]]) for expert, rank, _ in replicas)
        return self.limits.prices.far_replica * far + self.limits.prices.near_replica * (len(replicas) - far)

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
    """The state of a search with these replicas, in memory for all slots."""
    most = len(case.fixed_R) * case.limits.slots
    found = Shares(*(np.full(most, -1) for _ in range(3)))
    for values, given_values in zip(found, np.array(replicas, np.int64).reshape(-1, 3).T, strict=True):
        values[: len(replicas)] = given_values
    used_R = np.bincount([rank for _, rank, _ in replicas], minlength=len(case.fixed_R)).astype(np.int64)
    return Placing(case.counts_NE, case.loads(replicas), case.at_home(replicas), case.limits.slots - used_R, found)


def assert_consistent(case: Case, placing: Placing, replicas: Replicas) -> None:
    """Loads, tokens at home and free slots are those of the shares."""
    assert placing.loads_R.tolist() == case.loads(replicas).tolist()
    assert placing.at_home_E.tolist() == case.at_home(replicas).tolist()
    assert placing.at_home_E.min() >= 0
    used_R = np.bincount([rank for _, rank, _ in replicas], minlength=len(case.fixed_R))
    assert placing.free_slots_R.tolist() == (case.limits.slots - used_R).tolist()


@settings(max_examples=200)
@given(any_replicas())
def test_the_cost_is_that_of_a_plain_count(given_case: tuple[Case, Replicas]) -> None:
    case, replicas = given_case
    assert case.cost(replicas) == case.plain_cost(replicas)


@settings(max_examples=200)
@given(cases())
def test_local_replicas_are_allowed(case: Case) -> None:
    case.check(case.local())
    filled = case.filled()
    case.check(filled)
    balancing = listed(*place_replicas(case.instance, case.limits, case.target))
    assert {(e, r) for e, r, _ in balancing} <= {(e, r) for e, r, _ in filled}


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


@settings(max_examples=200)
@given(any_replicas())
def test_exchanges_keep_slots_and_shares_and_relieve_overloaded_ranks(given_case: tuple[Case, Replicas]) -> None:
    """One round, which is also that of a plain search."""
    case, replicas = given_case
    placing, plain = placing_of(case, replicas), placing_of(case, replicas)
    gave_up_R, plain_gave_up_R = np.zeros((2, len(case.fixed_R)), bool)
    homes = Homes.of(case.home_E, len(case.fixed_R))
    count, exchanges = exchange_replicas(placing, np.int64(len(replicas)), homes, case.limits, case.target, gave_up_R)
    search = PlainExchanges(plain, case.home_E, case.limits, case.target)
    assert (count, exchanges) == search.round(len(replicas), int(MOST_GIVERS), plain_gave_up_R)
    after = listed(placing.found, count)
    assert after == listed(plain.found, count)
    assert gave_up_R.tolist() == plain_gave_up_R.tolist()
    case.check(after)
    assert_consistent(case, placing, after)
    changed = {replica[:2] for replica in replicas} ^ {replica[:2] for replica in after}
    assert bool(changed) == (exchanges > 0)
    if not exchanges:
        assert after == replicas
    assert placing.loads_R.max() <= max(case.loads(replicas).max(), case.target)


@pytest.mark.longer
@pytest.mark.parametrize("seed", range(examples(short=60, long=1500)))
def test_exchanges_are_those_of_a_plain_search(seed: int) -> None:
    """Rounds from replicas in any order and from loads that shifts have changed, many of them equal; with more givers
    than a round has."""
    rng, many = np.random.default_rng(seed), seed % 5 == 0
    case = random_case(
        rng, nodes=int(rng.integers(20, 40) if many else rng.integers(2, 12)), per_node=int(rng.integers(2, 5)),
        slots=int(rng.integers(1, 4)), experts_per_rank=int(rng.integers(1, 4)),
        tokens=int(rng.choice([40, 300, 4000])), smallest=int(rng.choice([1, 8, 32])),
        unknown=bool(rng.random() < 0.3), skew=2.0,
    )  # fmt: skip
    grain = 1 + int(case.counts_NE.max()) // int(rng.choice([4, 20, 10**6]))
    case = replace(case, counts_NE=case.counts_NE // grain * grain, fixed_R=case.fixed_R // grain * grain)
    mean = int(case.counts_NE.sum() + case.fixed_R.sum()) // len(case.fixed_R)
    case = replace(case, target=mean // 2 if many else mean)
    replicas = case.local()
    kept = [replicas[p] for p in rng.permutation(len(replicas))[: len(replicas) * 9 // 10]]
    plain, placing = placing_of(case, kept), placing_of(case, kept)
    homes, count, num_plain = Homes.of(case.home_E, len(case.fixed_R)), len(kept), len(kept)
    gave_up_R, plain_gave_up_R = np.zeros((2, len(case.fixed_R)), bool)
    search = PlainExchanges(plain, case.home_E, case.limits, case.target)
    for _ in range(4):
        num_plain, expected = search.round(num_plain, int(MOST_GIVERS), plain_gave_up_R)
        count, exchanges = exchange_replicas(placing, np.int64(count), homes, case.limits, case.target, gave_up_R)
        assert (count, exchanges) == (num_plain, expected)
        assert listed(placing.found, count) == listed(plain.found, count)
        assert_consistent(case, placing, listed(placing.found, count))
        assert gave_up_R.tolist() == plain_gave_up_R.tolist()
        for state in (placing, plain):
            shift_shares(state, np.int64(count), case.home_E, case.limits, case.target, np.int64(1))


def test_shifts_and_exchanges_even_out_loads() -> None:
    """Skewed experts with a slot a rank: the largest load falls by most of what it is above the mean."""
    above = []
    for seed in range(20):
        case = random_case(
            np.random.default_rng(seed), nodes=4, per_node=4, slots=2, experts_per_rank=4, tokens=20_000, smallest=32,
            prices=Prices(1000, 1, 1000, 0, 0), skew=0.8,
        )  # fmt: skip
        mean = case.counts_NE.sum() / 16
        before, after = case.loads([]).max() / mean - 1, case.loads(case.local()).max() / mean - 1
        above.append((before, after))
    before, after = np.mean(above, axis=0)
    assert before > 1
    assert after < 0.1 * before


def least_cost(case: Case, replicas: Replicas) -> float:
    """The least cost with these copies, whatever their shares: a linear program over tokens by copy and source node."""
    prices, nodes = case.limits.prices, range(len(case.counts_NE))
    scale = 1 / prices.computed_row
    near = prices.near_row * (int(case.loads([]).sum()) // len(case.fixed_R)) * scale
    copies = [(e, int(rank)) for e, rank in enumerate(case.home_E)] + [replica[:2] for replica in replicas]
    flows = [(expert, rank, int(case.node_R[rank]), node) for expert, rank in copies for node in nodes]
    # Behind the flows the largest load, and the time of the busiest link.
    largest, busiest = len(flows), len(flows) + 1
    program = LinearProgram([0.0] * len(flows) + [1.0, 1.0])
    program.bound({busiest: 1.0}, least=near, most=float("inf"))
    for (node, expert), tokens in np.ndenumerate(case.counts_NE):
        mine = [i for i, flow in enumerate(flows) if flow[0] == expert and flow[3] == node]
        program.bound(dict.fromkeys(mine, 1.0), least=tokens, most=tokens)
    for rank, fixed in enumerate(case.fixed_R):
        mine = [i for i, flow in enumerate(flows) if flow[1] == rank]
        program.bound(dict.fromkeys(mine, 1.0) | {largest: -1.0}, most=-fixed)
    for node in nodes:
        leaves = [i for i, (_, _, at, source) in enumerate(flows) if source == node != at]
        arrives = [i for i, (_, _, at, source) in enumerate(flows) if at == node != source]
        for chosen in (leaves, arrives):
            program.bound(dict.fromkeys(chosen, prices.far_row * scale) | {busiest: -1.0}, most=0.0)
    return program.least_cost() / scale + case.transfers(replicas)


def test_shares_cost_little_more_than_the_best_for_the_same_copies() -> None:
    """At most 4% more on average. Rows between nodes cost a third of computed ones, as much, or three times."""
    ratios = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        case = random_case(
            rng, nodes=int(rng.integers(2, 5)), per_node=int(rng.integers(2, 5)), slots=int(rng.integers(1, 3)),
            experts_per_rank=int(rng.integers(2, 5)), tokens=8000, smallest=16,
            prices=Prices(3000, 100, int(rng.choice([1000, 3000, 9000])), 1000, 3000), skew=0.8,
        )  # fmt: skip
        replicas = case.local()
        ratios.append(case.cost(replicas) / least_cost(case, replicas))
    assert min(ratios) >= 1 - 1e-6
    assert np.mean(ratios) <= 1.04
    assert max(ratios) <= 1.2


@settings(max_examples=50)
@given(cases())
def test_a_node_s_own_tokens_stay_where_loads_allow(case: Case) -> None:
    """Without a target for loads, every copy computes its node's tokens, but for what has to stay at home."""
    assume(case.counts_NE.sum() > 0)
    limits = case.limits._replace(prices=case.limits.prices._replace(computed_row=0, near_replica=0, far_replica=0))
    found, count = place_local_replicas(case.instance, case.sources, limits, np.int64(1) << 40)
    left_E = case.counts_NE.sum(axis=0) - limits.smallest_share
    for expert, rank, tokens in listed(found, count):
        assert tokens == min(case.counts_NE[case.node_R[rank], expert], left_E[expert])
        left_E[expert] -= tokens
