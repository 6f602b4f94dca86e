"""Counting and workloads against counting one id, one sequence at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import planner_reference as reference
from helpers.planner_steps import Step, skewed_trace, steps, with_missing_routes
from helpers.random_plans import random_schedule
from trimtab import Workload
from trimtab.planner import SequenceCounts
from trimtab.trace import RoutingTrace
from trimtab.trace.counting import count_experts


@settings(max_examples=60)
@given(steps(), st.integers(1, 5), st.integers(0, 99))
def test_counts_are_those_of_a_plain_count(step: Step, num_groups: int, seed: int) -> None:
    group_S = np.random.default_rng(seed).integers(0, num_groups, step.trace.num_sequences)
    counts_GLE = count_experts(step.trace, group_S, num_groups)
    assert np.array_equal(counts_GLE, reference.count_experts(step.trace, group_S, num_groups))


@pytest.mark.parametrize("experts", [255, 256, 300])
def test_the_largest_expert_is_told_from_no_route(experts: int) -> None:
    """At 255 experts the largest id is one below "no route"; from 256 on ids are wider."""
    ids_TLK = np.array([[[0, experts - 1]], [[1, experts - 1]]])
    trace = RoutingTrace.from_sequences([ids_TLK, ids_TLK[:1]], num_experts=experts)
    trace.expert_ids[1] = trace.no_route
    counts = SequenceCounts.from_trace(trace)
    assert counts.counts_SLE[:, 0, experts - 1].tolist() == [1, 1]
    assert counts.counts_SLE.sum() == 4
    assert counts.unknown_SL.tolist() == [[2], [0]]


@settings(max_examples=60)
@given(steps(), st.integers(1, 4), st.integers(0, 99))
def test_a_workload_is_the_sum_of_its_sequences(step: Step, micro_steps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    schedule = random_schedule(rng, step.trace.num_sequences, num_ranks=3, num_micro_steps=micro_steps)
    expected = reference.workload(step.sequences, schedule)
    for actual in (Workload.from_trace(step.trace, schedule), Workload.from_sequences(step.sequences, schedule)):
        assert np.array_equal(actual.token_counts_MLRE, expected.token_counts_MLRE)
        assert np.array_equal(actual.unknown_MLR, expected.unknown_MLR)
        assert actual.num_rows == step.trace.num_tokens * step.trace.top_k * step.trace.num_layers


def test_long_sequences_are_counted_in_full() -> None:
    """70,000 tokens of one expert are more than 16 bits hold, 65,535 are not."""
    for length in (65_535, 70_000):
        ids_TLK = np.broadcast_to(np.array([[0, 1]]), (length, 1, 2))
        counts = SequenceCounts.from_trace(RoutingTrace.from_sequences([ids_TLK], num_experts=4))
        assert counts.counts_SLE[0, 0].tolist() == [length, length, 0, 0]


def test_parts_and_selections_hold_the_same_counts() -> None:
    rng = np.random.default_rng(0)
    trace = with_missing_routes(rng, skewed_trace(rng, sequences=7, layers=2, experts=6, top_k=2))
    parts = [SequenceCounts.from_trace(trace.select(chosen)) for chosen in ([0, 1], [2], [3, 4, 5, 6])]
    chosen = np.array([6, 2, 2, 0])
    joined, whole = SequenceCounts.concatenate(parts).select(chosen), SequenceCounts.from_trace(trace.select(chosen))
    assert np.array_equal(joined.counts_SLE, whole.counts_SLE)
    assert np.array_equal(joined.unknown_SL, whole.unknown_SL)
    assert joined.unknown_SL.any()
    assert np.array_equal(joined.lengths, trace.sequence_lengths[chosen])
