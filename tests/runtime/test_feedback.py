"""Measured times correct the scale of costs, and drop strategies that measure worse than simpler ones."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.moe_model import Shape
from helpers.planned_steps import make
from helpers.rank_pool import on_ranks
from helpers.rank_tests import runs_on_ranks
from trimtab.cluster import QWEN3_30B, ClusterSpec, StepCosts
from trimtab.planner.plan.strategy import ALL_BUT_NOTHING, ANY, NEAR, NOTHING, STEP, Strategy
from trimtab.runtime import PlannedStep
from trimtab.runtime import feedback as feedback_module
from trimtab.runtime.feedback import COMPARED_EVERY, DROPPED_STEPS, FIRST_COMPARED, Feedback
from trimtab.timeline import PARTS

NEAR_REPLICAS, REHOME = Strategy(replicas=NEAR), Strategy(homes=STEP)


def planned(strategy: Strategy, predicted_s: float, nothing_s: float, gain: float = 0.5) -> PlannedStep:
    """A plan whose passes take `predicted_s`; other parts take 100 s more."""
    parts = dict.fromkeys(PARTS, 0.0) | {"planning": 30.0, "migration": 30.0, "optimizer": 40.0, "experts": predicted_s}
    plan = cast(Any, SimpleNamespace(num_micro_steps=2))
    strategies_s = {"the best": (1 - gain) * (nothing_s + 40), "nothing": nothing_s + 40}
    return PlannedStep(cast(Any, None), (plan,), strategy, strategies_s, parts)


def run(feedback: Feedback, step: PlannedStep, seconds: float) -> None:
    feedback.begin(step)
    feedback.learn(np.array([round(seconds * 1e6), round(seconds * 0.9e6)]))


def test_the_scale_follows_measured_times() -> None:
    """Predictions are scaled by what was learned before, as a planner's are."""
    feedback = Feedback()
    for number in range(20):
        run(feedback, planned(NEAR_REPLICAS, 2.0 * feedback.scale, 3.0 * feedback.scale), 5.0)
        if number == 0:
            # The first step compiles.
            assert feedback.scale == 1.0
        assert feedback.scale == float(f"{feedback.scale:.3g}")
    assert feedback.scale == pytest.approx(2.5, rel=0.01)
    assert feedback.metrics() == {
        "plan/predicted_s": pytest.approx(5.0, rel=0.02), "plan/measured_s": 5.0, "plan/cost_scale": feedback.scale,
    }  # fmt: skip


def test_one_step_changes_the_scale_by_a_bounded_factor() -> None:
    feedback = Feedback()
    for _ in range(2):
        run(feedback, planned(NEAR_REPLICAS, 1.0, 2.0), 1e6)
    assert feedback.scale == pytest.approx(8**0.5, rel=0.01)


def test_a_strategy_that_measures_worse_than_a_simpler_one_is_dropped_for_some_steps() -> None:
    feedback = Feedback()
    run(feedback, planned(NEAR_REPLICAS, 1.0, 2.0), 9.0)
    run(feedback, planned(NOTHING, 2.0, 2.0), 2.0)
    assert feedback.excluded == frozenset()
    run(feedback, planned(REHOME, 1.0, 2.0), 1.5)
    assert feedback.excluded == frozenset()
    # Predicted to be faster, but it is not.
    run(feedback, planned(NEAR_REPLICAS, 1.0, 2.0), 3.0)
    assert feedback.excluded == frozenset({NEAR_REPLICAS.name})
    for left in reversed(range(DROPPED_STEPS)):
        run(feedback, planned(NOTHING, 2.0 * feedback.scale, 2.0 * feedback.scale), 2.0)
        assert feedback.excluded == frozenset({NEAR_REPLICAS.name} if left else ())
    # It is tried again, and kept where it is faster.
    run(feedback, planned(NEAR_REPLICAS, 1.0 * feedback.scale, 2.0 * feedback.scale), 1.0)
    assert feedback.excluded == frozenset()
    assert 0.2 < feedback.metrics()["plan/measured_gain"] < 0.6


def test_a_simpler_strategy_is_not_dropped_for_a_more_complex_one() -> None:
    feedback = Feedback()
    anywhere = Strategy(replicas=ANY)
    for name, seconds in ((anywhere, 9.0), (anywhere, 1.0), (NEAR_REPLICAS, 1.5), (REHOME, 1.7), (NOTHING, 2.0)):
        run(feedback, planned(name, 1.0, 2.0), seconds)
        assert feedback.excluded == frozenset()


def test_doing_nothing_is_measured_where_the_gain_is_small() -> None:
    feedback = Feedback()
    found = []
    for _ in range(2 * COMPARED_EVERY):
        run(feedback, planned(NEAR_REPLICAS, 1.0, 2.0, gain=0.05), 1.0)
        found.append(feedback.excluded == ALL_BUT_NOTHING)
        assert feedback.measures_nothing == found[-1]
    first = FIRST_COMPARED - 1
    assert [number for number, is_compared in enumerate(found) if is_compared] == [first, first + COMPARED_EVERY]
    run(feedback, planned(NEAR_REPLICAS, 1.0, 2.0, gain=0.2), 1.0)
    assert feedback.excluded == frozenset()


def test_steps_that_did_not_run_as_planned_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now, feedback = SimpleNamespace(value=100.0), Feedback()
    monkeypatch.setattr(feedback_module, "time", SimpleNamespace(perf_counter=lambda: now.value))
    step = planned(NEAR_REPLICAS, 1.0, 2.0)
    feedback.begin(step)
    feedback.enter(0)
    feedback.mark()
    assert feedback.take() == 0
    feedback.enter(1)
    now.value += 2.5
    feedback.mark()
    assert feedback.take() == 2_500_000
    feedback.begin(None)
    assert feedback.take() == 0
    for measured in ([5, 0], [0, 5]):
        feedback.begin(step)
        feedback.learn(np.array(measured))
    feedback.begin(replace(step, parts_s={}))
    feedback.learn(np.array([5, 5]))
    assert feedback.metrics() == {}


def test_costs_of_moves_are_measured_and_not_scaled() -> None:
    operations = StepCosts.of(ClusterSpec(8, 8), QWEN3_30B).operations
    scaled = operations.scaled(2.0)
    for name, value in operations._asdict().items():
        is_scaled = name.endswith("_s") and name not in ("near_state_s", "far_state_s")
        assert getattr(scaled, name) == value * (2.0 if is_scaled else 1.0), name


@runs_on_ranks()
def test_plans_price_what_the_dispatcher_sends() -> None:
    """Not what the given rates say."""
    for forwards in (False, True):
        session, _, _ = make(shape=Shape(layers=1, experts=4, top_k=2, hidden=8, width=8), rates=ClusterSpec(2, 2))
        for homes in session.homes:
            homes.dispatch_forwards = forwards
        session.plan_micro_steps([np.tile([0, 1], (16, 1, 1))])
        operations = json.loads(session.step_plan.settings)["costs"]["operations"]
        assert (operations["forwards"], operations["top_k"]) == (forwards, 2 if forwards else 1)


def learn_in_a_session(rates: ClusterSpec | None) -> list[float]:
    """The scale of every step's plan, one rank slower than the other."""
    shape = Shape(layers=2, experts=4, top_k=2, hidden=8, width=8)
    session, model, _ = make(torch.float64, shape=shape, rates=rates)
    rng, scales = np.random.default_rng(dist.get_rank()), []
    tokens = torch.zeros(16, dtype=torch.int64)
    for _ in range(4):
        session.plan_micro_steps([np.argsort(rng.random((16, 2, 4)), axis=-1)[:, :, :2] for _ in range(2)])
        scales.append(json.loads(session.step_plan.settings)["costs"]["operations"]["row_s"])
        for index in range(2):
            with session.micro_step(index):
                time.sleep(0.01 * dist.get_rank())
                model(tokens).sum().backward()
        session.finish_gradients(model.replicated())
        model.zero_grad()
    return scales


@pytest.mark.parametrize("rates", [None, ClusterSpec(2, 2)], ids=["measured", "given rates"])
def test_all_ranks_learn_the_same(rates: ClusterSpec | None) -> None:
    first, second = on_ranks(learn_in_a_session, (rates,), ranks=2)
    assert first == second
    assert first[0] == first[1]
    # Predicted are microseconds.
    assert (first[3] > first[2] > first[1]) == (rates is None)
    assert len(set(first)) == (3 if rates is None else 1)
