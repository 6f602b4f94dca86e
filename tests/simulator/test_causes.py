"""Seconds by cause: they add up, and equal a plain loop over passes, layers and ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.comparison_cases import some_case
from trimtab.cluster import Layout
from trimtab.cluster.operations import OperationCosts
from trimtab.planner.plan.step_times import dense_seconds
from trimtab.report.policies_table import CHANGES, waterfall_rows
from trimtab.simulator.comparison import simulate_policy
from trimtab.simulator.comparison_case import ComparisonCase
from trimtab.simulator.pipeline import BUBBLE
from trimtab.simulator.step import SEQUENCES, WAITING, StepSettings
from trimtab.timeline.layer_passes import RankWork


def plain_seconds(
    work: RankWork, attention_MR: np.ndarray, outer_MR: np.ndarray, costs: OperationCosts, recompute: bool
) -> float:
    """A step without replicas on one group of ranks, pass by pass."""
    num_micro_steps, num_layers, num_ranks = work.experts_MLR.shape
    time_R = np.zeros(num_ranks)

    def layer_of(m: int, layer: int, factor: float) -> None:
        exchange_R = costs.dispatch_s + np.maximum(work.near_MLR[m, layer], work.far_MLR[m, layer])
        for seconds_R in (exchange_R + factor * work.experts_MLR[m, layer], exchange_R):
            time_R[:] = time_R.max() + seconds_R

    def forward(m: int) -> None:
        for layer in range(num_layers):
            time_R[:] += attention_MR[m]
            layer_of(m, layer, 1.0)
        time_R[:] += outer_MR[m]

    for m in range(num_micro_steps if recompute else 0):
        forward(m)
    backward_start = 0.0
    for m in range(num_micro_steps):
        forward(m)
        backward_start = time_R.max()
        time_R += costs.dense_backward * outer_MR[m]
        for layer in reversed(range(num_layers)):
            layer_of(m, layer, costs.expert_backward)
            time_R += costs.dense_backward * attention_MR[m]
    end = time_R.max()
    return float(end + max(0.0, costs.reduce_s - (end - backward_start)) + costs.optimizer_s)


def mean(seconds: np.ndarray) -> np.ndarray:
    return np.broadcast_to(seconds.mean(axis=-1, keepdims=True), seconds.shape)


@pytest.mark.parametrize("recompute", [True, False])
def test_causes_of_static_equal_a_plain_loop(recompute: bool) -> None:
    case = replace(some_case(), settings=StepSettings(recompute=recompute))
    outcome = simulate_policy(case, "static")
    step, plan = outcome.simulated, outcome.plan
    costs = OperationCosts.of(case.cluster, case.model, moe_layers=plan.num_layers)
    attention_MR, outer_MR = dense_seconds(plan.schedule, case.sequences.lengths, costs)
    uneven = plain_seconds(step.work, attention_MR, outer_MR, costs, recompute)
    even_work = step.work._replace(experts_MLR=mean(step.work.experts_MLR))
    even_experts = plain_seconds(even_work, attention_MR, outer_MR, costs, recompute)
    even = plain_seconds(even_work, mean(attention_MR), mean(outer_MR), costs, recompute)
    assert step.step_time_s == pytest.approx(case.scale * uneven, rel=1e-12)
    assert step.causes_s[WAITING] == pytest.approx(case.scale * (uneven - even_experts), rel=1e-9)
    assert step.causes_s[SEQUENCES] == pytest.approx(case.scale * (even_experts - even), rel=1e-9, abs=1e-12)
    assert step.causes_s[WAITING] > 0 < step.causes_s[SEQUENCES]


@given(
    policy=st.sampled_from(["static", "scheduled", "eplb", "trimtab", "feplb", "balanced"]),
    groups=st.integers(1, 2),
    checkpointing=st.booleans(),
    mini_batches=st.integers(1, 2),
    pp=st.integers(1, 2),
)
def test_causes_and_waterfalls_add_up(
    policy: str, groups: int, checkpointing: bool, mini_batches: int, pp: int
) -> None:
    settings = StepSettings(groups=groups, checkpointing=checkpointing, layout=Layout(pp=pp))
    case = replace(some_case(), settings=settings, mini_batches=mini_batches)
    cases = [case, scaled_case(case)]
    for each in cases:
        static, other = (simulate_policy(each, name).simulated for name in ("static", policy))
        assert sum(other.causes_s.values()) == pytest.approx(other.step_time_s, rel=1e-9)
        assert sum(other.parts_s.values()) == pytest.approx(other.step_time_s, rel=1e-9)
        rows = waterfall_rows(static, other, policy)
        assert [row.name for row in rows] == ["static", *(each for each in CHANGES if pp > 1 or each != BUBBLE), policy]
        assert rows[-2].after == pytest.approx(rows[-1].seconds, rel=1e-9)
        assert rows[0].seconds + sum(row.seconds for row in rows[1:-1]) == pytest.approx(other.step_time_s, rel=1e-9)
    assert {cause for causes in CHANGES.values() for cause in causes} == other.causes_s.keys() | {BUBBLE}


def scaled_case(case: ComparisonCase) -> ComparisonCase:
    """The case with halves that are other cases."""
    fewer = [np.arange(first, part.num_sequences, 2) for first in (0, 1) for part in [case.sequences]]
    return replace(
        case,
        traces=(),
        halves=tuple(replace(case, sequences=case.sequences.select(each), traces=()) for each in fewer),
        recorded=case.sequences.num_sequences,
    )


def test_halves_remove_what_resampling_adds() -> None:
    case = scaled_case(some_case())
    found = simulate_policy(case, "trimtab")
    whole, first, second = (
        simulate_policy(each, "trimtab").simulated for each in (replace(case, halves=()), *case.halves)
    )
    assert found.drawn_s == (whole.step_time_s, first.step_time_s, second.step_time_s)
    assert found.simulated.step_time_s == 2 * whole.step_time_s - (first.step_time_s + second.step_time_s) / 2
    for cause, seconds in found.simulated.causes_s.items():
        expected = 2 * whole.causes_s[cause] - (first.causes_s[cause] + second.causes_s[cause]) / 2
        assert seconds == pytest.approx(expected)
