"""The split: that of the plain reference, and no other keeps more tokens near."""

from __future__ import annotations

from itertools import pairwise

import highspy
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import planner_reference as reference
from helpers.planner_steps import Instance, instances
from trimtab.array_type import Array
from trimtab.planner.replicas.kernel_values import Shares
from trimtab.planner.replicas.split import Quotas, split_tokens

Replicas = list[tuple[int, int, int]]


@st.composite
def shares(draw: st.DrawFn, *, max_tokens: int = 60) -> tuple[Instance, Replicas]:
    """An instance with the planner's replicas, or with any other."""
    instance = draw(instances(max_tokens=max_tokens))
    if draw(st.booleans()):
        return instance, by_expert(instance.replicas())
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    left_E = instance.counts_E.copy()
    replicas: Replicas = []
    for expert, rank in rng.permutation([(e, r) for e in range(len(left_E)) for r in range(instance.ranks)]):
        if instance.home_E[expert] != rank and rng.random() < 0.4:
            tokens = int(rng.choice([0, rng.integers(left_E[expert] + 1), left_E[expert]]))
            left_E[expert] -= tokens
            replicas.append((int(expert), int(rank), tokens))
    return instance, by_expert(replicas)


def by_expert(replicas: Replicas) -> Replicas:
    """Those of an expert follow one another, as the split needs them."""
    return sorted(replicas, key=lambda replica: replica[0])


def quotas_of(instance: Instance, replicas: Replicas) -> list[list[tuple[int, int]]]:
    """Quotas (source, tokens) of every replica, from the kernel."""
    shares = Shares(*np.array(replicas, np.int64).reshape(-1, 3).T.copy())
    # Full of what must not be read; the first three replicas and their five quotas are another instance's.
    first, begin = 3, 5
    memory = Quotas(
        np.full(first + len(replicas) + 3, -7),
        np.full(begin + len(replicas) * instance.ranks + 2, -7, np.int16),
        np.full(begin + len(replicas) * instance.ranks + 2, -7, np.int32),
    )
    memory.starts[first] = begin
    counts_E = instance.counts_RE.sum(axis=0, dtype=np.int64)
    split_tokens(instance.counts_RE, counts_E, instance.home_E, instance.per_node, shares, memory, first)
    starts = memory.starts[first : first + len(replicas) + 1].tolist()
    assert memory.starts[:first].tolist() == [-7] * first
    for values in memory[1:]:
        assert set(values[:begin].tolist()) | set(values[starts[-1] :].tolist()) == {-7}
    quotas = list(zip(memory.sources.tolist(), memory.tokens.tolist(), strict=True))
    return [quotas[start:end] for start, end in pairwise(starts)]


def split(instance: Instance, replicas: Replicas) -> Array:
    """Quotas `[P, R]` of the kernel."""
    quotas_PR = np.zeros((len(replicas), instance.ranks), np.int64)
    for p, quotas in enumerate(quotas_of(instance, replicas)):
        for source, tokens in quotas:
            assert quotas_PR[p, source] == 0
            assert tokens > 0
            quotas_PR[p, source] = tokens
    return quotas_PR


@settings(max_examples=150, deadline=None)
@given(shares())
def test_quotas_are_those_of_the_reference(case: tuple[Instance, Replicas]) -> None:
    instance, replicas = case
    expected = reference.split_tokens(instance.counts_RE, instance.home_E, instance.per_node, replicas)
    assert quotas_of(instance, replicas) == expected


@settings(max_examples=100, deadline=None)
@given(shares())
def test_quotas_add_up_to_shares_and_sources_have_them(case: tuple[Instance, Replicas]) -> None:
    instance, replicas = case
    quotas_PR = split(instance, replicas)
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


@settings(max_examples=100, deadline=None)
@given(shares())
def test_tokens_leave_a_node_only_beyond_what_its_copies_compute(case: tuple[Instance, Replicas]) -> None:
    instance, replicas = case
    quotas_PR = split(instance, replicas)
    nodes = instance.ranks // instance.per_node
    counts_NE = instance.counts_RE.reshape(nodes, instance.per_node, -1).sum(axis=1)
    computed_NE, far_E = np.zeros_like(counts_NE), np.zeros(len(instance.counts_E), np.int64)
    node_R = np.arange(instance.ranks) // instance.per_node
    at_home_RE = instance.counts_RE.astype(np.int64)
    for (expert, rank, tokens), quotas_R in zip(replicas, quotas_PR, strict=True):
        computed_NE[node_R[rank], expert] += tokens
        far_E[expert] += quotas_R[node_R != node_R[rank]].sum()
        at_home_RE[:, expert] -= quotas_R
    for expert, home in enumerate(instance.home_E):
        computed_NE[node_R[home], expert] += at_home_RE[:, expert].sum()
        far_E[expert] += at_home_RE[node_R != node_R[home], expert].sum()
    assert far_E.tolist() == np.maximum(counts_NE - computed_NE, 0).sum(axis=0).tolist()


@settings(max_examples=150, deadline=None)
@given(shares(max_tokens=4000))
def test_ranks_of_a_node_send_the_same_part_to_its_copies(case: tuple[Instance, Replicas]) -> None:
    """Ranks without a copy of their own, which would come first."""
    instance, replicas = case
    quotas_PR = split(instance, replicas)
    for expert in {expert for expert, _, _ in replicas}:
        mine = [p for p, (e, _, _) in enumerate(replicas) if e == expert]
        ranks = np.array([int(instance.home_E[expert])] + [replicas[p][1] for p in mine])
        at_home_R = instance.counts_RE[:, expert] - quotas_PR[mine].sum(axis=0)
        sent_CR = np.vstack([at_home_R, quotas_PR[mine]])
        for first in range(0, instance.ranks, instance.per_node):
            others = np.setdiff1d(np.arange(first, first + instance.per_node), ranks)
            inside_C = ranks // instance.per_node == first // instance.per_node
            counts = instance.counts_RE[others, expert]
            if counts.sum():
                sent = sent_CR[inside_C][:, others].sum(axis=0)
                # Each copy's part is rounded by less than a token.
                assert np.all(np.abs(sent - counts * (sent.sum() / counts.sum())) <= 2 * inside_C.sum())


def test_a_link_is_not_busier_than_others_of_its_node() -> None:
    """The copy on rank 4 computes half of its node's tokens: rank 4 keeps its own, the others send a third each."""
    counts_RE = np.full((8, 8), 30, np.int32)
    instance = Instance(counts_RE, np.zeros(8, np.int64), np.arange(8, dtype=np.int16), 4, 1, 0, 1)
    assert quotas_of(instance, [(0, 4, 60)]) == [[(4, 30), (5, 10), (6, 10), (7, 10)]]
    # Beyond its node's tokens it gets those of the home's node, which come evenly, too.
    assert quotas_of(instance, [(0, 4, 150)]) == [[(4, 30), (5, 30), (6, 30), (7, 30), (1, 10), (2, 10), (3, 10)]]


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
