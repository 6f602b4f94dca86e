"""LLEP: equal to outputs of its source, and as a policy."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import Step, check_policy, golden, instances, random_step, random_steps
from trimtab.array_type import Array
from trimtab.policies.rivals.llep import Llep, assign


@pytest.mark.parametrize("case", golden("llep"))
def test_golden(case: dict[str, Any]) -> None:
    shares_S4 = assign(np.array(case["load"]), case["ranks"], case["max_tokens_factor"], case["min_tokens_per_gemm"])
    assignments: dict[str, list[list[int]]] = {}
    rank_load = [0] * case["ranks"]
    transfers = []
    for expert, rank, first, end in shares_S4.tolist():
        assignments.setdefault(str(expert), []).append([rank, first, end])
        rank_load[rank] += end - first
        home = expert // (case["experts"] // case["ranks"])
        if rank != home:
            transfers.append([expert, home, rank])
    assert list(assignments.items()) == list(case["assignments"].items())
    assert rank_load == case["rank_load"]
    assert transfers == case["weight_transfers"]


def plain_shares(load_E: Array, home_E: Array, ranks: int, smallest: int, slots: int) -> list[list[int]]:
    """Shares if no rank should exceed the mean: helpers are sorted anew for each of their turns."""
    shares: list[list[int]] = []
    limit = max(int(load_E.sum()) // ranks or int(load_E.sum()), 1)
    loads, free = np.bincount(home_E, load_E, ranks).astype(int).tolist(), [slots] * ranks
    for e in np.argsort(-load_E, kind="stable").tolist():
        home, left, helping = int(home_E[e]), int(load_E[e]), set[int]()
        loads[home] -= left
        kept = min(max(limit - loads[home], 0), left)
        turn = [(home, kept)] if kept else []
        while left:
            for rank, tokens in turn:
                if rank != home and rank not in helping:
                    free[rank] -= 1
                    helping.add(rank)
                first = int(load_E[e]) - left
                if shares and shares[-1][:2] == [e, rank] == [e, home]:
                    shares[-1][3] += tokens
                else:
                    shares.append([e, rank, first, first + tokens])
                loads[rank] += tokens
                left -= tokens
            may_help = [r for r in range(ranks) if r != home and (free[r] or r in helping)]
            may_help.sort(key=lambda r: loads[r])
            turn, rest = [], left
            for rank in may_help:
                share = min(rest, limit - loads[rank])
                if share > 0 and (share >= smallest or share == rest) and not (kept and turn):
                    turn.append((rank, share))
                    rest -= share
            if rest and not (kept and turn):
                turn.append((may_help[0] if may_help else home, rest))
    return shares


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 24), st.integers(0, 3) | st.none())
def test_shares_are_those_of_a_plain_search(seed: int, ranks: int, experts: int, slots: int | None) -> None:
    rng = np.random.default_rng(seed)
    load_E = rng.integers(0, rng.choice([2, 100, 5000]), experts) * (rng.random(experts) < 0.8)
    home_E, smallest = rng.integers(0, ranks, experts), int(rng.choice([1, 64]))
    shares_S4 = assign(load_E, ranks, 1.0, smallest, home_E=home_E, slots=slots)
    assert shares_S4.tolist() == plain_shares(load_E, home_E, ranks, smallest, experts if slots is None else slots)
    for expert in range(experts):
        shares = shares_S4[shares_S4[:, 0] == expert]
        ends = np.r_[0, shares[:, 3]]
        assert np.array_equal(shares[:, 2], ends[:-1])
        assert ends[-1] == load_E[expert]
        assert np.all(shares[:, 3] > shares[:, 2])
    if slots is not None:
        helped = np.unique(shares_S4[home_E[shares_S4[:, 0]] != shares_S4[:, 1], :2], axis=0)
        assert np.bincount(helped[:, 1], minlength=ranks).max(initial=0) <= slots


@settings(max_examples=60)
@given(random_steps(), st.sampled_from([1.0, 1.1]), st.sampled_from([1, 128, 1024]), st.sampled_from([1.0, 1.3]))
def test_plans_are_valid_and_keep_to_the_terms(step: Step, factor: float, smallest: int, gate: float) -> None:
    plans = check_policy(Llep(factor, smallest, gate), step)
    own = plans["own"]
    helped = [Counter(rank for _, rank, _ in replicas) for replicas in instances(own)]
    assert own.slots_per_rank == max((count for ranks in helped for count in ranks.values()), default=0)


@pytest.mark.parametrize(("hot", "moved"), [(8000, [2000]), (7999, [])])
def test_an_instance_is_planned_from_a_max_over_mean_of_1_3(hot: int, moved: list[int]) -> None:
    """Rank 0 has 13,000 of 20,000 tokens or one less, and keeps 1.1 times the mean, as in the source's example."""
    step = random_step(np.random.default_rng(0), ranks=2, experts=4, layers=1, micro_steps=1, sequences=2)
    step.sequences.counts_SLE[:] = [[[hot, 5000, 4000, 11_000 - hot]], [[0, 0, 0, 0]]]
    step.schedule.rank[:] = 0
    step.placement.home[:] = [[0, 0, 1, 1]]
    plan = step.plan(Llep())
    assert plan.quota_tokens.tolist() == moved


def test_tokens_are_taken_in_the_order_of_sources() -> None:
    """Half of the tokens stay at home: those of the first sources."""
    step = random_step(np.random.default_rng(0), ranks=2, experts=2, layers=1, micro_steps=1, sequences=2)
    step.sequences.counts_SLE[:] = [[[60, 0]], [[40, 0]]]
    step.schedule.rank[:] = [0, 1]
    step.placement.home[:] = [[0, 1]]
    plan = step.plan(Llep(1.0, 1, 1.0), equal_terms=True)
    assert plan.replica_experts.tolist() == [0]
    assert plan.quota_sources.tolist() == [0, 1]
    assert plan.quota_tokens.tolist() == [10, 40]
