"""Predicted times against simulated steps, and rows between nodes against following every quota."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import planner_reference as reference
from helpers.planner_steps import per_nodes, random_homes, workloads
from helpers.random_plans import random_plan, random_schedule
from helpers.simulated_steps import Case, cases, free_costs
from trimtab import ClusterSpec, ModelSpec, Placement, Schedule, StepPlan, Workload
from trimtab.cluster import StepCosts
from trimtab.planner import PlannedStep, PlanSettings, SequenceCounts, plan_sequences
from trimtab.planner.plan.prediction import Prediction, cross_node_rows, predict
from trimtab.planner.plan.strategy import STAY
from trimtab.policies import POLICIES
from trimtab.policies.planning_time import PlanningTime
from trimtab.simulator.step import StepSettings, simulate_step


@settings(max_examples=80)
@given(workloads(), st.integers(0, 3), st.data())
def test_rows_between_nodes_are_those_of_every_quota(
    case: tuple[Workload, Schedule, Placement], slots: int, data: st.DataObject
) -> None:
    workload, schedule, placement = case
    per_node, rng = data.draw(per_nodes(workload.num_ranks)), np.random.default_rng(data.draw(st.integers(0, 99)))
    plan = random_plan(rng, workload, schedule, slots=slots, placement=placement, ranks_per_node=per_node)
    expected = np.zeros((plan.num_micro_steps, plan.num_layers), np.int64)
    for (m, layer, source, rank), rows in reference.rows_by_way(plan, workload).items():
        expected[m, layer] += rows * (source // per_node != rank // per_node)
    assert np.array_equal(cross_node_rows(plan, workload), expected)


@dataclass(frozen=True, eq=False)
class Predicted:
    """A planned step of any size, its prediction and its simulation, without planning."""

    planned: PlannedStep
    prediction: Prediction
    simulated: dict[str, float]


def random_step(seed: int) -> Predicted:
    """8 to 64 ranks in nodes of 4 or 8, 1 or 2 groups, homes that moved before the step, links of any rate."""
    rng = np.random.default_rng(seed)
    model = ModelSpec.named(str(rng.choice(["qwen3-30b-a3b", "gpt-oss-120b", "glm-4.5-air", "qwen3-235b-a22b"])))
    ranks, per_node, groups = int(rng.choice([8, 16, 32, 64])), int(rng.choice([4, 8])), int(rng.integers(1, 3))
    layers, micro_steps, mini_batches = int(rng.integers(2, 5)), int(rng.integers(1, 9)), int(rng.integers(1, 3))
    cluster = ClusterSpec(
        ranks, per_node, int(rng.integers(1, 4)), network_bytes_per_s=float(rng.choice([12e9, 50e9, 400e9])),
        dispatch_network_bytes_per_s=float(rng.choice([10e9, 45e9])),
        host_bytes_per_s=float(rng.choice([0, 55e9, 200e9])), dispatch_forwards=bool(rng.integers(2)),
    )  # fmt: skip
    sequences = random_counts(rng, model, layers, tokens=ranks * groups * micro_steps * int(rng.choice([2000, 8000])))
    number, places = sequences.num_sequences, ranks * groups * micro_steps
    recompute, checkpointing, ring = bool(rng.integers(2)), bool(rng.integers(2)), int(rng.integers(2, 5))
    costs = StepCosts.of(
        cluster, model, moe_layers=layers, groups=groups, recompute=recompute, checkpointing=checkpointing,
        ring_layers=ring,
    )  # fmt: skip
    before = Placement.contiguous(layers, model.num_experts, ranks)
    if rng.random() < 0.5:
        before = random_homes(rng, layers, model.num_experts, ranks)
    # Also plans that take longer are compared.
    chosen = PlanSettings(
        least_gain=-9.0 if rng.random() < 0.5 else 0.0, move_life=float(rng.choice([1, 1, 1000])), smallest_share=16
    )
    planned = plan_sequences(
        sequences, before, cluster, groups=groups, costs=costs, settings=chosen,
        token_budget=max(int(sequences.lengths.max()), round(1.1 * sequences.lengths.sum() / places)),
        mini_batch=np.arange(number) * mini_batches // number,
    )  # fmt: skip
    lengths, workloads, simulated = [], [], []
    for group, plan in enumerate(planned.plans):
        mine, part = planned.schedule.of_group(group, ranks)
        lengths.append(sequences.lengths[mine])
        workloads.append(Workload.from_sequences(sequences.select(mine), part))
        traits = replace(POLICIES["trimtab"].traits, planning=PlanningTime())
        simulated.append(
            simulate_step(
                plan, workloads[-1], lengths[-1], costs.operations, cluster, traits, before=before,
                settings=StepSettings(ring_layers=ring, recompute=recompute, checkpointing=checkpointing),
            )
        )  # fmt: skip
    prediction = predict(planned.plans, workloads, costs, lengths=lengths, before_LE=before.home)
    slowest = max(simulated, key=lambda step: step.step_time_s)
    return Predicted(planned, prediction, slowest.parts_s)


def random_counts(rng: np.random.Generator, model: ModelSpec, layers: int, tokens: int) -> SequenceCounts:
    """Sequences of 200 to 4,000 tokens of any taste, so many that they have about `tokens` tokens."""
    lengths = np.minimum(rng.lognormal(6.8, 0.8, max(2, tokens // 1200)).astype(np.int64) + 200, 4000)
    shape = (len(lengths), layers, model.num_experts)
    hot_SLE = rng.gumbel(size=shape[1:]) * rng.uniform(0, 0.8) + rng.gumbel(size=shape) * rng.uniform(0, 1.0)
    weights_SLE = np.exp(hot_SLE)
    weights_SLE /= weights_SLE.sum(axis=2, keepdims=True)
    counts_SLE = np.minimum(
        rng.multinomial((lengths * model.top_k)[:, None].repeat(layers, 1), weights_SLE), lengths[:, None, None]
    )
    unknown_SL = lengths[:, None] * model.top_k - counts_SLE.sum(axis=2)
    return SequenceCounts(counts_SLE.astype(np.uint16), lengths, unknown_SL.astype(np.int32))


@settings(max_examples=40)
@given(cases(max_groups=1), st.integers(1, 3))
def test_without_replicas_predicted_parts_are_those_of_the_simulator(case: Case, forwards: int) -> None:
    """Rows, experts, moves and sums of gradients are timed in the same way.

    Dense parts take all ranks as long here: predicted ranks also wait for each other at the end of a pass.
    """
    plan = case.plan.without_replicas()
    dense = ("token_s", "square_s", "reach_s", "outer_token_s", "outer_square_s", "outer_reach_s")
    case = replace(case, plan=plan).free(*dense).but(
        known_at="past", copies="none", transfers_start="never", hops=1, ideal=False, recompute=forwards > 1,
        checkpointing=forwards > 2,
    )  # fmt: skip
    costs, before_LE = StepCosts(case.costs, forwards), None if case.before is None else case.before.home
    found = predict([plan], [case.workload], costs, lengths=[case.lengths], before_LE=before_LE)
    expected = case.run()
    assert found.seconds == pytest.approx(expected.step_time_s, rel=1e-9)
    assert found.parts_s == pytest.approx(expected.parts_s, rel=1e-9, abs=1e-9 * expected.step_time_s)


def plan_of_rows(rows: int, home_E: list[int]) -> tuple[StepPlan, Workload]:
    """One instance on four ranks, two a node, without replicas; every expert has `rows` rows of its home's rank."""
    counts_RE = np.zeros((4, 4), np.int32)
    counts_RE[home_E, np.arange(4)] = rows
    workload = Workload.known(counts_RE[None, None])
    plan = StepPlan.from_instances(
        random_schedule(np.random.default_rng(0), 0, num_ranks=4, num_micro_steps=1),
        Placement(np.array([home_E], np.int16)),
        [np.empty((0, 2), np.int64)],
        [np.empty((0, 4), np.int64)],
        mixed_ML=workload.mixed_ML,
        cluster=ClusterSpec(4, 2, 1),
    )
    return plan, workload


def test_planning_and_moves_are_part_of_a_prediction() -> None:
    """Rank 0 gets an expert from its node and two from the other one, each of which is sent by another rank."""
    costs = StepCosts(free_costs(near_state_s=5.0, far_state_s=7.0))
    plan, workload = plan_of_rows(0, [0, 0, 0, 0])
    before_LE = np.arange(4)[None]
    found = predict([plan], [workload], costs, before_LE=before_LE, planning_s=3.0)
    assert found.parts_s == dict.fromkeys(found.parts_s, 0.0) | {"planning": 3.0, "migration": 14.0}
    assert found.seconds == 17.0
    # The other way round the sender is what takes longest.
    plan, workload = plan_of_rows(0, [0, 1, 2, 3])
    found = predict([plan], [workload], costs, before_LE=np.zeros((1, 4), np.int64))
    assert found.seconds == found.parts_s["migration"] == 14.0


def test_a_step_takes_as_long_as_its_slowest_group() -> None:
    costs = StepCosts(free_costs(row_s=1.0))
    (quick, few), (slow, many) = (plan_of_rows(rows, [0, 1, 2, 3]) for rows in (2, 5))
    alone = predict([slow], [many], costs)
    # Five rows in two forwards and a backward.
    assert alone.seconds == alone.parts_s["experts"] == 5 * (2 + 2)
    for plans_G, workloads_G in (((quick, slow), (few, many)), ((slow, quick), (many, few))):
        assert predict(plans_G, workloads_G, costs).parts_s == alone.parts_s


def test_predicted_parts_are_close_to_simulated_ones() -> None:
    """Of 20 steps of all kinds, each part within 1.5% of the step, and the whole step within 1%."""
    mirrors = moves = replicas = 0
    for seed in range(20):
        step = random_step(seed)
        whole = sum(step.simulated.values())
        for part, seconds in step.simulated.items():
            assert abs(step.prediction.parts_s[part] - seconds) <= 0.015 * whole, (seed, part)
        assert step.prediction.seconds == pytest.approx(whole, rel=0.01)
        mirrors += any(plan.replica_paths.any() for plan in step.planned.plans)
        moves += step.planned.chosen_strategy.homes != STAY
        # The plan's own prediction is that of `predict`, which counts moves whole if it is given the homes before.
        assert step.planned.parts_s == pytest.approx(step.prediction.parts_s), seed
        replicas += any(plan.num_replicas for plan in step.planned.plans)
    assert min(mirrors, moves, replicas) >= 2
