"""The split: that of the plain reference, and no other keeps more tokens near."""

from __future__ import annotations

import highspy
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import planner_reference as reference
from helpers.planner_steps import Instance, instances
from trimtab.array_type import Array
from trimtab.planner.replicas.kernel_values import Shares
from trimtab.planner.replicas.split import split_tokens

Replicas = list[tuple[int, int, int]]


@st.composite
def shares(draw: st.DrawFn) -> tuple[Instance, Replicas]:
    """An instance with the planner's replicas, or with any other."""
    instance = draw(instances(max_tokens=60))
    if draw(st.booleans()):
        return instance, instance.replicas()
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    left_E = instance.counts_E.copy()
    replicas: Replicas = []
    for expert, rank in rng.permutation([(e, r) for e in range(len(left_E)) for r in range(instance.ranks)]):
        if instance.home_E[expert] != rank and rng.random() < 0.4:
            tokens = int(rng.choice([0, rng.integers(left_E[expert] + 1), left_E[expert]]))
            left_E[expert] -= tokens
            replicas.append((int(expert), int(rank), tokens))
    return instance, replicas


def split(instance: Instance, replicas: Replicas) -> Array:
    """Quotas `[P, R]` of the kernel."""
    shares = Shares(*np.array(replicas, np.int64).reshape(-1, 3).T.copy())
    # Longer than needed, and full of what must not be read.
    quotas_PR = np.full((len(replicas) + 2, instance.ranks), -7, np.int64)
    split_tokens(instance.counts_RE, instance.home_E, instance.per_node, shares, quotas_PR)
    return quotas_PR[: len(replicas)]


@settings(max_examples=150, deadline=None)
@given(shares())
def test_quotas_are_those_of_the_reference(case: tuple[Instance, Replicas]) -> None:
    instance, replicas = case
    expected = reference.split_tokens(instance.counts_RE, instance.home_E, instance.per_node, replicas)
    assert np.array_equal(split(instance, replicas), expected)


@settings(max_examples=100, deadline=None)
@given(shares())
def test_quotas_add_up_to_shares_and_sources_have_them(case: tuple[Instance, Replicas]) -> None:
    instance, replicas = case
    quotas_PR = split(instance, replicas)
    assert quotas_PR.min(initial=0) >= 0
    assert quotas_PR.sum(axis=1).tolist() == [tokens for _, _, tokens in replicas]
    taken_RE = np.zeros_like(instance.counts_RE)
    for (expert, _, _), quotas_R in zip(replicas, quotas_PR, strict=True):
        taken_RE[:, expert] += quotas_R
    assert np.all(taken_RE <= instance.counts_RE)


@settings(max_examples=60, deadline=None)
@given(shares())
def test_no_split_has_fewer_tokens_leave_their_rank_or_node(case: tuple[Instance, Replicas]) -> None:
    instance, replicas = case
    quotas_PR = split(instance, replicas)
    for expert in {expert for expert, _, _ in replicas}:
        mine = [p for p, (e, _, _) in enumerate(replicas) if e == expert]
        ranks = np.array([instance.home_E[expert]] + [replicas[p][1] for p in mine])
        at_home_R = instance.counts_RE[:, expert] - quotas_PR[mine].sum(axis=0)
        flow_CR = np.vstack([at_home_R, quotas_PR[mine]])
        for per_seat in (1, instance.per_node):
            leaves_CR = ranks[:, None] // per_seat != np.arange(instance.ranks) // per_seat
            assert flow_CR[leaves_CR].sum() == fewest_leaving(flow_CR.sum(axis=1), flow_CR.sum(axis=0), leaves_CR)


def fewest_leaving(rooms_C: Array, tokens_R: Array, leaves_CR: Array) -> int:
    """The least cost of a flow from sources to copies in which what leaves costs 1 a token (a linear program)."""
    solver = highspy.Highs()
    solver.silent()
    solver.setOptionValue("threads", 1)
    for leaves in leaves_CR.reshape(-1):
        solver.addCol(float(leaves), 0.0, highspy.kHighsInf, 0, np.empty(0, np.int32), np.empty(0))
    columns_CR = np.arange(leaves_CR.size, dtype=np.int32).reshape(leaves_CR.shape)
    for columns, sums in ((columns_CR, rooms_C), (columns_CR.T, tokens_R)):
        for row, total in zip(columns, sums, strict=True):
            solver.addRow(float(total), float(total), len(row), row.copy(), np.ones(len(row)))
    solver.run()
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return round(solver.getInfo().objective_function_value)
