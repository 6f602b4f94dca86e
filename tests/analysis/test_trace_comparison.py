"""Two traces compared: each figure against a plain computation, and what can't be compared."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from helpers.trace_counts import random_counts, trace_counts_of
from trimtab import InputError
from trimtab.analysis import Analysis, analyze
from trimtab.analysis.trace_comparison import TraceComparison, TraceFigures, compare_traces


def analysis_of(counts_MLE: Any, ranks: int = 4, **changes: Any) -> Analysis:
    return analyze(trace_counts_of(counts_MLE, **changes), ranks=ranks)


def compared(first: Analysis, second: Analysis) -> TraceComparison:
    return compare_traces(("a.parquet", "b.parquet"), first, second)


@pytest.mark.parametrize("seed", range(3))
def test_differences_are_b_minus_a_and_turn_their_sign_when_the_two_are_swapped(seed: int) -> None:
    first, second = (analysis_of(random_counts(seed + add), steps=[0, 0, 0, 1, 1, 1]) for add in (0, 5))
    there, back = compared(first, second), compared(second, first)
    assert (there.a, there.b) == (back.b, back.a)
    for part in fields(TraceFigures):
        a, b, change = (getattr(each, part.name) for each in (there.a, there.b, there.difference))
        assert change == (None if a is None else b - a)
        assert getattr(back.difference, part.name) == (None if a is None else -change)
    assert there.a.expert_time_lost == first.total.lost
    assert there.b.lost_with_past == min(
        each.expert_time_lost for each in second.placements.strategies if each.based_on == "past"
    )


def test_a_trace_and_itself_are_equal() -> None:
    analysis = analysis_of(random_counts(3))
    found = compared(analysis, analysis)
    assert {getattr(found.difference, part.name) for part in fields(TraceFigures)} <= {0, None}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            analysis_of(random_counts(0, layers=2)),
            "can't compare: a.parquet has 3 MoE layers (0 to 2) of 8 experts, b.parquet has 2 MoE layers (0 to 1) of 8 "
            "experts; layers and experts should be the same in both",
        ),
        (analysis_of(random_counts(0, experts=16)), r"3 MoE layers (0 to 2) of 16 experts"),
        (
            analysis_of(random_counts(0), layer_indices=np.array([0, 1, 7])),
            "b.parquet has 3 MoE layers (0 to 1, 7) of 8 experts",
        ),
        (
            analysis_of(random_counts(0), ranks=2),
            "can't compare: a.parquet is on 4 ranks, 4 per node, b.parquet on 2 ranks, 2 per node; use the same ranks",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(other: Analysis, message: str) -> None:
    with pytest.raises(InputError) as refused:
        compared(analysis_of(random_counts(0)), other)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
