"""Two traces compared: each figure against a plain computation, and what can't be compared."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from helpers.trace_counts import random_counts, trace_counts_of
from trimtab import InputError
from trimtab.analysis import Analysis, analyze
from trimtab.analysis.trace_comparison import TraceComparison, TraceFigures, compare_traces, figures


def analysis_of(counts_MLE: Any, ranks: int = 4, **changes: Any) -> Analysis:
    return analyze(trace_counts_of(counts_MLE, **changes), ranks=ranks)


def compared(first: Analysis, second: Analysis) -> TraceComparison:
    return compare_traces(("a.parquet", "b.parquet"), first, second)


@pytest.mark.parametrize("seed", range(4))
def test_layers_and_experts_are_those_of_a_plain_computation(seed: int) -> None:
    counts = [random_counts(seed, experts=16), random_counts(seed + 10, micro_steps=3, experts=16)]
    found = compared(*map(analysis_of, counts))
    for place, layer in enumerate(found.by_layer):
        loads = [each[:, place].sum(axis=0) for each in counts]
        ratios = []
        for each in counts:
            ranks = each[:, place].reshape(len(each), 4, 4).sum(axis=2)
            ratios.append(np.mean([row.max() / row.mean() for row in ranks if row.any()]) - 1)
        assert (layer.max_vio_a, layer.max_vio_b) == pytest.approx(tuple(ratios))
        shares = [load / load.sum() for load in loads]
        assert layer.overlap == pytest.approx(sum(min(pair) for pair in zip(*shares, strict=True)))
        centred = [load - load.mean() for load in loads]
        assert layer.correlation == pytest.approx(
            centred[0] @ centred[1] / np.sqrt((centred[0] @ centred[0]) * (centred[1] @ centred[1]))
        )
        top = [sorted(range(16), key=lambda expert: -load[expert])[:2] for load in loads]
        assert layer.hottest_in_common == len({*top[0]} & {*top[1]}) / 2
    assert (found.hottest_of_layer, found.chance) == (2, 2 / 16)
    over = [each.sum(axis=0) / each.sum(axis=(0, 2))[:, None] * 16 for each in counts]
    for expert in found.hottest:
        values = tuple(each[expert.layer, expert.expert] for each in over)
        assert (expert.over_mean_a, expert.over_mean_b) == pytest.approx(values)
    listed = {(expert.layer, expert.expert) for expert in found.hottest}
    for each in over:
        assert {divmod(int(place), 16) for place in np.argsort(-each, axis=None)[:10]} <= listed


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
    assert [found.mean(name) for name in ("correlation", "overlap", "hottest_in_common")] == pytest.approx([1, 1, 1])
    assert found.parts_a == found.parts_b


def test_the_distribution_has_every_instance_of_both_once() -> None:
    first, second = analysis_of(random_counts(1)), analysis_of(random_counts(2, micro_steps=2))
    found = compared(first, second)
    assert found.edges[0] == 1.0
    assert found.edges[-1] == max(first.total.max_over_mean.worst, second.total.max_over_mean.worst)
    for analysis, parts in ((first, found.parts_a), (second, found.parts_b)):
        assert sum(parts) == pytest.approx(1)
        known = analysis.max_over_mean_ML[~np.isnan(analysis.max_over_mean_ML)]
        middle = found.edges[len(parts) // 2]
        assert sum(parts[: len(parts) // 2]) == pytest.approx((known < middle).mean())


def test_layers_without_load_and_even_layers_have_no_figure() -> None:
    counts = random_counts(0)
    empty, even = counts.copy(), counts.copy()
    empty[:, 1] = 0
    even[:, 1] = 7
    layer = compared(analysis_of(counts), analysis_of(empty)).by_layer[1]
    assert (layer.max_vio_b, layer.correlation, layer.overlap, layer.hottest_in_common) == (None,) * 4
    layer = compared(analysis_of(counts), analysis_of(even)).by_layer[1]
    assert layer.correlation is None
    assert layer.overlap is not None
    assert figures(compared(analysis_of(counts), analysis_of(empty)))["overlap"] is not None


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
