"""Links of ranks: an instance's time is that of a plain count, and the split by links is close to a linear program."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.linear_program import LinearProgram
from helpers.planner_steps import Replicas, random_instance
from trimtab import ClusterSpec
from trimtab.array_type import Array
from trimtab.planner import PlanSettings
from trimtab.planner.replicas.kernel_values import Homes, Limits, Prices, Shares
from trimtab.planner.replicas.layer_plan import NO_LIMIT, plan_layer
from trimtab.planner.replicas.links import Load, load_at_home, load_with, longest_times, prices_of_rows, split_by_links
from trimtab.planner.replicas.split import Quotas, split_tokens

Flows = dict[tuple[int, int, int], int]
"""Tokens by expert, source rank and the rank that computes them."""


@dataclass(frozen=True, eq=False)
class Case:
    """An instance with replicas `[P]`, ordered by expert, and their split."""

    counts_RE: Array
    fixed_R: Array
    home_E: Array
    limits: Limits
    shares: Shares
    quotas: Quotas

    def load(self) -> Load:
        """Of the kernels."""
        homes = Homes.of(self.home_E, len(self.fixed_R))
        at_home = load_at_home(self.counts_RE, self.fixed_R, homes, self.limits)
        return Load(*load_with(at_home, self.home_E, self.limits, self.shares, self.quotas))

    def time(self) -> int:
        """Of the kernels."""
        return int(longest_times(self.load(), prices_of_rows(self.limits)))

    def split(self, most_rows: int = int(NO_LIMIT)) -> Case:
        """With the split by links, of the replicas that it keeps."""
        shares = Shares(*(column.copy() for column in self.shares))
        quotas = Quotas(*(column.copy() for column in self.quotas))
        kept = split_by_links(self.counts_RE, self.load(), self.home_E, self.limits, most_rows, shares, quotas)
        shares = Shares(*(column[:kept] for column in shares))
        return Case(self.counts_RE, self.fixed_R, self.home_E, self.limits, shares, quotas)

    def flows(self) -> Flows:
        """Tokens of replicas and homes."""
        found: Flows = {}
        left_RE = self.counts_RE.astype(np.int64)
        for p, (expert, rank) in enumerate(zip(self.shares.experts.tolist(), self.shares.ranks.tolist(), strict=True)):
            for q in range(self.quotas.starts[p], self.quotas.starts[p + 1]):
                source, tokens = int(self.quotas.sources[q]), int(self.quotas.tokens[q])
                assert (expert, source, rank) not in found
                assert tokens > 0
                found[expert, source, rank] = tokens
                left_RE[source, expert] -= tokens
        assert left_RE.min() >= 0
        return found | {(e, s, int(self.home_E[e])): int(t) for (s, e), t in np.ndenumerate(left_RE) if t}

    def rows(self) -> Array:
        """Rows `[R]` that each rank computes."""
        rows_R = self.fixed_R.copy()
        for (_, _, rank), tokens in self.flows().items():
            rows_R[rank] += tokens
        return rows_R

    def plain_time(self) -> int:
        """Flow by flow: over links of nodes, sent rows cross to the rank or to the relay in its node."""
        per, prices = self.limits.ranks_per_node, self.limits.prices
        links = Counter[tuple[str, int]]()
        for (_, source, rank), tokens in self.flows().items():
            if source // per != rank // per:
                links["far out", source] += tokens
                relay = rank // per * per + source % per
                links["far in", relay if self.limits.forwards else rank] += tokens
            elif source != rank and not self.limits.forwards:
                links["near out", source] += tokens
                links["near in", rank] += tokens
        crossing = [
            max(
                max(links["near out", r], links["near in", r]) * (prices.near_row // 2),
                max(links["far out", r], links["far in", r]) * (prices.far_row * per // 2),
            )
            for r in range(len(self.fixed_R))
        ]
        computing = (self.rows() * prices.computed_row).tolist()
        return max(crossing) + max(a + b for a, b in zip(crossing, computing, strict=True))


def random_case(
    seed: int, *, forwards: bool = False, prices: Prices | None = None, smallest: int | None = None, full: bool = False
) -> Case:
    """Two to four nodes with any replicas, split by `split_tokens`; `full`: in all slots."""
    rng = np.random.default_rng(seed)
    per_node, nodes, slots = int(rng.integers(1, 5)), int(rng.integers(2, 5)), int(rng.integers(1, 4))
    ranks = per_node * nodes
    instance = random_instance(
        rng, ranks=ranks, per_node=per_node, experts_per_rank=int(rng.integers(1, 5)), slots=slots,
        tokens=int(rng.choice([0, 30, 4000])) if not full else 4000, threshold=1.0,
        smallest_share=smallest or int(rng.choice([1, 16, 100])), unknown=float(rng.choice([0.0, 0.2])),
    )  # fmt: skip
    if prices is None:
        computed, near, far = (int(rng.choice([1, 1000, 10**9])) for _ in range(3))
        prices = Prices(computed, near, far, 0, 0)
    settings = PlanSettings(smallest_share=instance.smallest_share)
    limits = settings.limits(ClusterSpec(ranks, per_node, slots), prices, forwards=forwards)
    left_E, free, replicas = instance.counts_E, [slots] * ranks, []
    pairs = [(e, r) for e in range(len(left_E)) for r in range(ranks)]
    for expert, rank in rng.permutation(pairs).tolist():
        most = int(left_E[expert]) - instance.smallest_share
        if instance.home_E[expert] == rank or not free[rank] or most < instance.smallest_share:
            continue
        if not full and rng.random() < 0.5:
            continue
        tokens = int(rng.integers(instance.smallest_share, most + 1))
        left_E[expert] -= tokens
        free[rank] -= 1
        replicas.append((expert, rank, tokens))
    shares, quotas = split(instance.counts_RE, instance.home_E, per_node, sorted(replicas))
    return Case(instance.counts_RE, instance.fixed_R, instance.home_E, limits, shares, quotas)


def split(counts_RE: Array, home_E: Array, per_node: int, replicas: Replicas) -> tuple[Shares, Quotas]:
    """Of `split_tokens`, with the memory that planning has."""
    shares, cells = Shares(*np.array(replicas, np.int64).reshape(-1, 3).T.copy()), len(replicas) * len(counts_RE)
    quotas = Quotas(np.zeros(len(replicas) + 1, np.int64), np.empty(cells, np.int16), np.empty(cells, np.int32))
    counts_E = counts_RE.sum(axis=0, dtype=np.int64)
    split_tokens(counts_RE, counts_E, home_E, np.int64(per_node), shares, quotas)
    return shares, quotas


seeds = st.integers(0, 2**32)


@settings(max_examples=200)
@given(seeds, st.booleans())
def test_time_is_that_of_a_plain_count(seed: int, forwards: bool) -> None:
    case = random_case(seed, forwards=forwards)
    assert case.time() == case.plain_time()


@settings(max_examples=200)
@given(seeds, st.sampled_from([0.9, 1.0, 1.2, 100.0]))
# The last sweeps make these longer.
@example(867, 100.0)
@example(3043, 100.0)
def test_a_split_by_links_keeps_tokens_limits_and_shares_and_takes_no_longer(seed: int, part: float) -> None:
    case = random_case(seed)
    most_rows = int(case.rows().max() * part)
    after = case.split(most_rows)
    # Every source's tokens of every expert are computed once, on copies that there were.
    assert after.time() == after.plain_time()
    assert after.time() <= case.time() * (1 + 1e-6)
    copies = set(zip(case.shares.experts.tolist(), case.shares.ranks.tolist(), strict=True))
    assert set(zip(after.shares.experts.tolist(), after.shares.ranks.tolist(), strict=True)) <= copies
    assert after.rows().max() <= max(most_rows, case.rows().max())
    total = Counter[tuple[int, int]]()
    for (expert, _, rank), tokens in after.flows().items():
        total[expert, rank] += tokens
    before = Counter[tuple[int, int]]()
    for (expert, _, rank), tokens in case.flows().items():
        before[expert, rank] += tokens
    assert after.shares.tokens.tolist() == [
        total[copy] for copy in zip(after.shares.experts.tolist(), after.shares.ranks.tolist(), strict=True)
    ]
    least = case.limits.smallest_share
    assert all(tokens >= least or tokens >= before[copy] for copy, tokens in total.items())


def least_time(case: Case) -> float:
    """The least time with these copies, whatever their split: a linear program over tokens by source and copy."""
    per, prices = case.limits.ranks_per_node, case.limits.prices
    copies = [(e, int(rank)) for e, rank in enumerate(case.home_E)]
    copies += zip(case.shares.experts.tolist(), case.shares.ranks.tolist(), strict=True)
    flows = [(e, s, rank) for e, rank in copies for s in range(len(case.fixed_R)) if case.counts_RE[s, e]]
    scale, both, links = 1 / prices.computed_row, len(flows), len(flows) + 1
    program = LinearProgram([0.0] * len(flows) + [1.0, 1.0])
    for (source, expert), tokens in np.ndenumerate(case.counts_RE):
        mine = [i for i, flow in enumerate(flows) if flow[:2] == (expert, source)]
        if tokens:
            program.bound(dict.fromkeys(mine, 1.0), least=tokens, most=tokens)
    for r, fixed in enumerate(case.fixed_R.tolist()):
        computed = {i: 1.0 for i, flow in enumerate(flows) if flow[2] == r}
        for row, is_far in ((prices.near_row // 2, False), (prices.far_row * per // 2, True)):
            for end in (1, 2):
                mine = [
                    i for i, flow in enumerate(flows)
                    if flow[end] == r and flow[1] != flow[2] and (flow[1] // per != flow[2] // per) == is_far
                ]  # fmt: skip
                crossing = dict.fromkeys(mine, row * scale)
                program.bound(crossing | {links: -1.0}, most=0.0)
                together = {i: crossing.get(i, 0.0) + computed.get(i, 0.0) for i in crossing.keys() | computed.keys()}
                program.bound(together | {both: -1.0}, most=-fixed)
    return program.least_cost() / scale


def test_time_is_close_to_the_best_split_of_the_same_copies() -> None:
    """Rows between nodes cost a third of computed ones, as much, or three times; most of what could be saved is."""
    ratios, saved = [], []
    for seed in range(40):
        far = int(np.random.default_rng(seed).choice([1000, 3000, 9000]))
        case = random_case(seed, prices=Prices(3000, 300, far, 0, 0), smallest=1, full=True)
        least, before, after = least_time(case), case.time(), case.split().time()
        ratios.append(after / least)
        saved.append((before - after, before - least))
    assert min(ratios) >= 1 - 1e-6
    assert np.mean(ratios) <= 1.08
    found, possible = np.sum(saved, axis=0)
    assert found >= 0.95 * possible


def test_a_split_by_links_holds_where_a_row_between_nodes_costs_more_than_all_others() -> None:
    """Local copies leave hardly any rows between nodes, so that moving tokens there makes times many times as long."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        counts_RE = rng.integers(200, 2500, (6, 6)).astype(np.int32)
        price = int(10 ** rng.uniform(10, 12))
        settings = PlanSettings(threshold=1.5)
        limits = settings.limits(ClusterSpec(6, 2, 2), Prices(7 * 10**7, 10**7, price, 0, 0), forwards=False)
        home_E = rng.permutation(6).astype(np.int16)
        table = plan_layer(counts_RE[None, None], np.zeros((1, 6), np.int64), 0, home_E, limits)
        quotas = Quotas(table.quota_starts, table.sources, table.tokens)
        planned = Case(counts_RE, np.zeros(6, np.int64), home_E, limits, table.shares, quotas)
        nothing = Case(counts_RE, planned.fixed_R, home_E, limits, *split(counts_RE, home_E, 2, []))
        assert planned.plain_time() <= nothing.plain_time()


def test_links_are_loaded_evenly_where_loads_are_even() -> None:
    """Ranks 0 and 1 compute 400 rows each, of one expert each, but only rank 0's come from the other node."""
    counts_RE = np.zeros((4, 4), np.int32)
    counts_RE[2:, 0] = 200
    counts_RE[1, 1] = 400
    home_E = np.array([0, 0, 2, 3], np.int16)
    limits = PlanSettings(smallest_share=1).limits(ClusterSpec(4, 2, 2), Prices(10, 100, 1000, 0, 0), forwards=False)
    # All of expert 1 and a token of expert 0 are on rank 1.
    shares, quotas = split(counts_RE, home_E, 2, [(0, 1, 1), (1, 1, 400)])
    case = Case(counts_RE, np.zeros(4, np.int64), home_E, limits, shares, quotas)
    after = case.split()
    from_far = Counter[int]()
    for (_, source, rank), tokens in after.flows().items():
        from_far[rank] += tokens * (source >= 2)
    assert from_far[0] == pytest.approx(200, rel=0.05)
    assert after.time() <= 0.7 * case.time()
    # Rank 1 has 401 rows, and may have no more than 450.
    assert case.split(450).rows().tolist() == [350, 450, 0, 0]


def test_plans_for_rows_sent_one_by_one_take_less_time_than_those_for_tokens() -> None:
    """In their own terms, added up over instances."""
    times = []
    for seed in range(20):
        case = random_case(seed, prices=Prices(3000, 300, 3000, 0, 0), smallest=1, full=True)
        counts_MLRE, fixed_MR = case.counts_RE[None, None], case.fixed_R[None]
        tables = (
            plan_layer(counts_MLRE, fixed_MR, 0, case.home_E, case.limits._replace(forwards=forwards))
            for forwards in (False, True)
        )
        times.append(
            [
                Case(
                    case.counts_RE, case.fixed_R, case.home_E, case.limits, table.shares,
                    Quotas(table.quota_starts, table.sources, table.tokens),
                ).plain_time()
                for table in tables
            ]
        )  # fmt: skip
    rows, tokens = np.sum(times, axis=0)
    assert rows <= 0.95 * tokens
