"""Plans and routing of measured steps, and the comparison with predictions."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.runtime import RuntimeBenchmark
from experiments.simulator_validation import MeasuredStep, compare, measure_steps
from trimtab.planner import Workload

TINY = RuntimeBenchmark(tokens=256, rounds=1, seeds=1, layers=2, hidden=16, width=32, experts=16, sequence_length=32)


@pytest.mark.slow
def test_measured_steps_have_the_plans_and_routing_that_ran() -> None:
    steps = measure_steps(TINY, ranks=2)
    assert set(steps) == {"static", "trimtab", "balanced"}
    skewed, even, _ = TINY.draw(2)
    assert np.array_equal(steps["static"].trace.expert_ids, skewed.expert_ids)
    assert np.array_equal(steps["balanced"].trace.expert_ids, even.expert_ids)
    for step in steps.values():
        step.plan.check(Workload.from_trace(step.trace, step.schedule))
        assert 0 < step.interval[0] <= step.seconds <= step.interval[1]
    assert steps["static"].plan.num_replicas == 0
    assert steps["trimtab"].plan.num_replicas > 0


def step(seconds: float, spread: float) -> MeasuredStep:
    trace, _, schedule = TINY.draw(2)
    plan: object = None
    return MeasuredStep(seconds, (seconds - spread, seconds + spread), trace, schedule, plan)  # type: ignore[arg-type]


def test_predictions_are_compared_by_error_and_order() -> None:
    measured = {"static": step(1.4, 0.05), "trimtab": step(1.03, 0.05), "balanced": step(1.0, 0.05)}
    good = compare(measured, {"static": 1.5, "trimtab": 0.98, "balanced": 1.0})
    assert good["variants"]["static"]["error"] == pytest.approx(1.5 / 1.4 - 1)
    # The intervals of trimtab and balanced overlap, so either may be first.
    assert (good["within_tolerance"], good["order_is_right"]) == (True, True)
    off = compare(measured, {"static": 1.6, "trimtab": 1.0, "balanced": 1.0})
    assert (off["within_tolerance"], off["order_is_right"]) == (False, True)
    upside_down = compare(measured, {"static": 1.0, "trimtab": 1.1, "balanced": 1.0})
    assert not upside_down["order_is_right"]
