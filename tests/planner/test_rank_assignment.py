"""Rank assignment never lowers the number of local rows, and changes ranks only within a micro-step and group."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import planner_reference as reference
from helpers.planner_steps import Step, steps
from helpers.random_plans import random_schedule
from trimtab import ClusterSpec, Placement, Schedule
from trimtab.array_type import Array
from trimtab.planner import SequenceCounts
from trimtab.planner.schedule.rank_assignment import assign_ranks, rows_by_node


@dataclass(frozen=True, eq=False)
class Case:
    """What `assign_ranks` is given."""

    lengths: Array
    schedule: Schedule
    rows_SN: Array
    token_budget: int
    groups: int
    work: Array | None

    def assign(self) -> Schedule:
        return assign_ranks(
            self.lengths, self.schedule, self.rows_SN, self.token_budget, num_groups=self.groups, work=self.work
        )

    def bins(self, schedule: Schedule) -> Array:
        """Micro-step and group `[S]` of every sequence, as one number."""
        return schedule.micro_step * self.groups + schedule.rank // (schedule.num_ranks // self.groups)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    nodes, per_node, groups = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sequences = draw(st.sampled_from([0, 1, 2, 30, 300]))
    schedule = random_schedule(rng, sequences, num_ranks=nodes * per_node * groups, num_micro_steps=2)
    lengths = rng.integers(1, 50, sequences)
    return Case(
        lengths=lengths,
        schedule=schedule,
        rows_SN=rng.multinomial(draw(st.sampled_from([3, 100])), rng.dirichlet(np.ones(nodes)), size=sequences).astype(
            np.int64
        ),
        token_budget=int(reference.by_place(schedule, lengths).max()) + draw(st.sampled_from([0, 20, 1000])),
        groups=groups,
        work=lengths**2 if draw(st.booleans()) else None,
    )


@settings(max_examples=80, deadline=None)
@given(cases())
def test_no_fewer_rows_are_local(case: Case) -> None:
    before, after = (reference.local_rows(s, case.rows_SN, case.groups) for s in (case.schedule, case.assign()))
    assert after >= before


@settings(max_examples=80, deadline=None)
@given(cases())
def test_sequences_stay_in_their_micro_step_and_group_one_for_one(case: Case) -> None:
    assigned, ones = case.assign(), np.ones_like(case.lengths)
    assert np.array_equal(assigned.micro_step, case.schedule.micro_step)
    assert np.array_equal(case.bins(assigned), case.bins(case.schedule))
    assert np.array_equal(reference.by_place(assigned, ones), reference.by_place(case.schedule, ones))


@settings(max_examples=80, deadline=None)
@given(cases())
def test_budgets_and_the_busiest_attention_are_kept(case: Case) -> None:
    assigned = case.assign()
    work = case.lengths if case.work is None else case.work
    assert reference.by_place(assigned, case.lengths).max() <= case.token_budget
    shape = (assigned.num_micro_steps, case.groups, -1)
    after, before = (reference.by_place(s, work).reshape(shape).max(axis=2) for s in (assigned, case.schedule))
    assert np.all(after <= before)


def crossed(**changes: object) -> Case:
    """Two nodes of one rank; each of two sequences uses only the other's node."""
    case = Case(
        lengths=np.array([5, 3]),
        schedule=Schedule(np.zeros(2, np.int32), np.array([0, 1], np.int32), np.zeros(1, np.int32), 2),
        rows_SN=np.array([[0, 9], [9, 0]]),
        token_budget=5,
        groups=1,
        work=None,
    )
    return replace(case, **changes)  # type: ignore[arg-type]


def test_crossed_sequences_change_ranks_unless_something_forbids_it() -> None:
    assert crossed().assign().rank.tolist() == [1, 0]
    two_groups = Schedule(np.zeros(2, np.int32), np.array([0, 3], np.int32), np.zeros(1, np.int32), 4)
    two_micro_steps = replace(crossed().schedule, micro_step=np.array([0, 1]), mini_batch_of_micro_step=np.zeros(2))
    three = replace(crossed().schedule, micro_step=np.zeros(3, np.int32), rank=np.array([0, 1, 1], np.int32))
    third_sequence = {"schedule": three, "lengths": np.array([5, 3, 2]), "rows_SN": np.array([[0, 9], [9, 0], [0, 9]])}
    for forbidden in (
        crossed(schedule=two_groups, groups=2),
        crossed(schedule=two_micro_steps),
        crossed(token_budget=6, work=np.array([5, 3, 2]), **third_sequence),
        crossed(token_budget=9, work=np.array([5, 3, 1]), **third_sequence),
    ):
        assert np.array_equal(forbidden.assign().rank, forbidden.schedule.rank)
    assert crossed(token_budget=7, work=np.array([5, 5, 1]), **third_sequence).assign().rank.tolist() == [1, 0, 1]


@settings(max_examples=40, deadline=None)
@given(steps())
def test_rows_by_node_are_those_of_a_plain_count(step: Step) -> None:
    rows_SN = rows_by_node(step.sequences, step.placement, step.cluster)
    expected = np.zeros_like(rows_SN)
    for (s, layer, e), tokens in np.ndenumerate(step.sequences.counts_SLE):
        expected[s, step.placement.home[layer, e] // step.cluster.ranks_per_node] += tokens
    assert rows_SN.shape == (step.trace.num_sequences, step.cluster.nodes)
    if step.cluster.nodes > 1:
        assert np.array_equal(rows_SN, expected)


def test_many_sequences_find_better_ranks() -> None:
    """Each of 200 sequences uses experts of one node only. Local rows rise from about 25% to over 90%."""
    rng = np.random.default_rng(0)
    sequences = SequenceCounts(np.zeros((200, 1, 8), np.int32), np.full(200, 10), np.zeros((200, 1), np.int32))
    node_of_sequence = rng.permutation(np.repeat(np.arange(4), 50))
    sequences.counts_SLE[np.arange(200), 0, node_of_sequence * 2] = 10
    cluster = ClusterSpec(8, 2)
    rows_SN = rows_by_node(sequences, Placement.contiguous(1, 8, 8), cluster)
    schedule = Schedule(np.zeros(200, np.int32), (np.arange(200) % 8).astype(np.int32), np.zeros(1, np.int32), 8)
    assigned = assign_ranks(sequences.lengths, schedule, rows_SN, 250)
    assert reference.local_rows(schedule, rows_SN, 1) < 0.4 * rows_SN.sum()
    assert reference.local_rows(assigned, rows_SN, 1) > 0.9 * rows_SN.sum()
