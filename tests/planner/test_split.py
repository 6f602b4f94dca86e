"""The split: that of the plain reference, and no other keeps more tokens near."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import planner_reference as reference
from helpers.linear_program import LinearProgram
from helpers.planner_steps import Instance, Replicas, instances_with_replicas, shares_of
from trimtab.array_type import Array
from trimtab.planner.replicas.split import Quotas, split_tokens


def quotas_of(instance: Instance, replicas: Replicas) -> list[list[tuple[int, int]]]:
    """Quotas (source, tokens) of every replica, from the kernel."""
    # Full of what must not be read, and longer than needed.
    cells = len(replicas) * instance.ranks + 2
    memory = Quotas(np.full(len(replicas) + 3, -7), np.full(cells, -7, np.int16), np.full(cells, -7, np.int32))
    split_tokens(instance.counts_RE, instance.counts_E, instance.home_E, instance.per_node, shares_of(replicas), memory)
    starts = memory.starts[: len(replicas) + 1].tolist()
    for values in memory[1:]:
        assert set(values[starts[-1] :].tolist()) == {-7}
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


@settings(max_examples=200)
@given(st.sampled_from([60, 4000]).flatmap(lambda most: instances_with_replicas(max_tokens=most)))
def test_quotas_are_those_of_the_reference(case: tuple[Instance, Replicas]) -> None:
    instance, replicas = case
    expected = reference.split_tokens(instance.counts_RE, instance.home_E, instance.per_node, replicas)
    assert quotas_of(instance, replicas) == expected


@settings(max_examples=60)
@given(instances_with_replicas())
def test_no_split_has_fewer_tokens_leave_their_rank_or_node(case: tuple[Instance, Replicas]) -> None:
    instance, replicas = case
    quotas_PR = split(instance, replicas)
    for expert in {expert for expert, _, _ in replicas}:
        mine = [p for p, (e, _, _) in enumerate(replicas) if e == expert]
        ranks_C = np.array([instance.home_E[expert]] + [replicas[p][1] for p in mine])
        at_home_R = instance.counts_RE[:, expert] - quotas_PR[mine].sum(axis=0)
        flow_CR = np.vstack([at_home_R, quotas_PR[mine]])
        for per_seat in (1, instance.per_node):
            leaves_CR = ranks_C[:, None] // per_seat != np.arange(instance.ranks) // per_seat
            assert flow_CR[leaves_CR].sum() == fewest_leaving(flow_CR.sum(axis=1), flow_CR.sum(axis=0), leaves_CR)


def test_a_link_is_not_busier_than_others_of_its_node() -> None:
    """The copy on rank 4 computes half of its node's tokens: rank 4 keeps its own, the others send a third each."""
    counts_RE = np.full((8, 8), 30, np.int32)
    instance = Instance(counts_RE, np.zeros(8, np.int64), np.arange(8, dtype=np.int16), 4, 1, 0, 1)
    assert quotas_of(instance, [(0, 4, 60)]) == [[(4, 30), (5, 10), (6, 10), (7, 10)]]
    # Beyond its node's tokens it gets those of the home's node, which come evenly, too.
    assert quotas_of(instance, [(0, 4, 150)]) == [[(4, 30), (5, 30), (6, 30), (7, 30), (1, 10), (2, 10), (3, 10)]]


def fewest_leaving(rooms_C: Array, tokens_R: Array, leaves_CR: Array) -> int:
    """The least cost of a flow from sources to copies in which what leaves costs 1 a token."""
    program = LinearProgram(leaves_CR.reshape(-1))
    columns_CR = np.arange(leaves_CR.size).reshape(leaves_CR.shape)
    for columns, sums in ((columns_CR, rooms_C), (columns_CR.T, tokens_R)):
        for row, total in zip(columns, sums, strict=True):
            program.bound(dict.fromkeys(row.tolist(), 1.0), least=total, most=total)
    return round(program.least_cost())
