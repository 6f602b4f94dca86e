"""Planning during rollout and step, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.planned_times import idle_step
from helpers.planner_steps import free_replicas, skewed_trace
from trimtab import ClusterSpec, Placement
from trimtab.planner import PlanSettings, SequenceCounts, pack_by_length
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.planner.plan.step_planning import StepPlanning
from trimtab.planner.plan.strategy import ANY, STEP, Strategy
from trimtab.policies.planning_time import Exchange, HiddenPlanning, PlanningTime, TimeAtSize, largest_instance_bytes


def hidden(planning: PlanningTime, *, ranks: int, layers: int, threads: int = 1) -> HiddenPlanning:
    """Of three micro-steps without replicas."""
    return HiddenPlanning.of(planning, *idle_step(ranks, 3), layers=layers, threads=threads)


def test_each_part_is_planned_where_it_can_be_hidden() -> None:
    """Microseconds with 10 layers and 3 micro-steps on 4 ranks."""
    time = TimeAtSize(
        4, schedule=1000.0, schedule_instance=10.0, homes=500.0, homes_instance=20.0, choice=900.0, instance=50.0,
        join=2.0,
    )  # fmt: skip
    planning = PlanningTime((time,), route_us=0.5, exchange=Exchange(100.0, 0.25))
    found = hidden(planning, ranks=4, layers=10, threads=3)
    assert found.rollout_s * 1e6 == pytest.approx((10 * 500 + 30 * 20) / 3 + 900 / 3)
    # The longest sequence has 100 tokens, top-2. A header is two sequences, and homes and counts of 4 experts.
    header = 3 * 1000 + 30 * 10 + 0.5 * 100 * 2 * 10 + 2 * (100 + (2 * 8 + 10 * 4 * 4) * 0.25)
    assert found.header_s * 1e6 == pytest.approx(header)
    # Of 10 layers a rank plans 3.
    assert found.round_s * 1e6 == pytest.approx(3 * 50 + 10 * 2 + 3 * 100)
    # The sample of a strategy has 8 layers.
    many = hidden(planning, ranks=4, layers=10, threads=100).rollout_s * 1e6
    assert many == pytest.approx((10 * 500 + 30 * 20) / 100 + 900 / 8)
    assert hidden(PlanningTime(), ranks=4, layers=10) == HiddenPlanning()
    # More ranks than layers make no round shorter.
    instances = PlanningTime((TimeAtSize(1, instance=100.0),))
    rounds = [hidden(instances, ranks=ranks, layers=16).round_s for ranks in (1, 8, 16, 32)]
    assert rounds[0] > rounds[1] > rounds[2] == rounds[3]


def test_parts_of_a_round_have_the_size_of_the_largest_instance() -> None:
    plan, workload, lengths = idle_step(4, 3)
    assert largest_instance_bytes(plan) == 0
    # Two replicas in one instance, with one and three quotas; one in another.
    plan = replace(
        plan,
        replica_starts=np.array([0, 0, 2, 2, 3, 3, 3]),
        replica_experts=np.zeros(3, np.int16),
        replica_ranks=np.zeros(3, np.int16),
        quota_starts=np.array([0, 1, 4, 9]),
        quota_sources=np.zeros(9, np.int16),
        quota_tokens=np.ones(9, np.int32),
    )
    assert largest_instance_bytes(plan) == max(2 * 12 + 4 * 6, 12 + 5 * 6)
    planning = PlanningTime((TimeAtSize(4, instance=1.0),), exchange=Exchange(byte_us=2.0))
    found = HiddenPlanning.of(planning, plan, workload, lengths, layers=10, threads=1)
    assert found.round_s * 1e6 == pytest.approx(3 + 3 * 3 * 48 * 2)


def test_slices_make_the_plan_of_the_whole_step() -> None:
    """The rounds that are charged: every micro-step by itself, some layers at a time, at given homes."""
    trace = skewed_trace(np.random.default_rng(0), sequences=64, layers=8, experts=32, top_k=4, max_length=200)
    sequences, cluster = SequenceCounts.from_trace(trace), ClusterSpec(8, 4, 2)
    budget = round(sequences.lengths.sum() / 8 / 3)
    schedule = pack_by_length(sequences.lengths, num_ranks=8, token_budget=budget)
    loads, costs = StepLoads.of_sequences(sequences, schedule, 8), free_replicas(cluster)
    homes = Placement.contiguous(8, 32, 8)
    planning = StepPlanning(loads, homes, cluster, PlanSettings(), costs, None, threads=1)
    strategy = Strategy(homes=STEP, replicas=ANY, slots=2, exposed=0.02, move_penalty=0.5)
    whole = planning.plan(strategy, planning.micro_steps, planning.layers)
    slices = [
        planning.plan(strategy, np.array([m]), layers, homes=[whole.home_LE[layer] for layer in layers]).replicas[0]
        for m in planning.micro_steps
        for layers in np.split(planning.layers, 4)
    ]
    for name in ("experts", "ranks", "sources", "tokens"):
        found = np.concatenate([getattr(table, name) for table in slices])
        assert np.array_equal(found, getattr(whole.replicas[0], name)), name
    assert len(whole.replicas[0].ranks) > 0
