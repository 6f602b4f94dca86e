"""The chosen strategy is the one with the least predicted time, on steps that are their own sample."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from helpers.planner_steps import (
    Step,
    free_moves_only,
    free_replicas,
    random_homes,
    skewed_trace,
    steps,
    with_missing_routes,
    with_operations,
)
from trimtab import ClusterSpec, Placement, Workload
from trimtab.cluster import QWEN3_30B, StepCosts
from trimtab.planner import PlannedStep, PlanSettings, Schedule, StepPlan, pack_by_length, plan_schedule
from trimtab.planner.placement.home_swaps import place_experts
from trimtab.planner.plan.prediction import predict
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.planner.plan.step_planning import StepPlanning
from trimtab.planner.plan.strategy import ANY, NEAR, NONE, NOTHING, STAY, STEP, Strategy
from trimtab.planner.plan.strategy_choice import WAYS, choose_strategy
from trimtab.planner.schedule.time_packing import pack_by_time

EXACT = 1e-9


def random_step(seed: int, *, sequences: int = 48, unknown: bool = False) -> Step:
    """At most four micro-steps and three layers, so that the sample is the whole step; two nodes of four."""
    rng = np.random.default_rng(seed)
    trace = skewed_trace(rng, sequences=sequences, layers=3, experts=32, top_k=4, max_length=120)
    if unknown:
        trace = with_missing_routes(rng, trace)
    groups = 1 + seed % 2
    return Step(
        trace=trace,
        placement=random_homes(rng, 3, 32, 8),
        cluster=ClusterSpec(8, 4, 1 + seed % 2),
        groups=groups,
        token_budget=max(120, round(trace.sequence_lengths.sum() / 8 / groups / 1.5)),
        mini_batch=np.arange(sequences) * 2 // sequences,
        settings=PlanSettings(1.005, 4, move_life=1),
    )


def costs_of(seed: int, cluster: ClusterSpec) -> StepCosts:
    """Real ones, whose fixed times are large beside those of few rows; free replicas; free moves."""
    return (StepCosts.of(cluster, QWEN3_30B), free_replicas(cluster), free_moves_only(cluster))[seed % 3]


def seconds_of(step: Step, planned: PlannedStep, plans: tuple[StepPlan, ...], costs: StepCosts) -> float:
    """Predicted seconds of some plans, with all moves."""
    lengths = []
    for group in range(step.groups):
        mine, _ = planned.schedule.of_group(group, step.cluster.ranks)
        lengths.append(step.trace.sequence_lengths[mine])
    workloads, before_LE = step.workloads(planned.schedule), step.placement.home
    return predict(plans, workloads, costs, lengths=lengths, before_LE=before_LE).seconds


def planned_as(step: Step, planned: PlannedStep, strategy: Strategy, costs: StepCosts) -> tuple[StepPlan, ...]:
    """The plans of a given strategy for the same schedule."""
    loads = StepLoads.of_sequences(step.sequences, planned.schedule, step.cluster.ranks)
    planning = StepPlanning(loads, step.placement, step.cluster, step.settings, costs, None, 1)
    found = planning.plan(strategy, planning.micro_steps, planning.layers)
    return tuple(
        StepPlan.from_replicas(
            loads.schedules[group], Placement(found.home_LE), found.replicas[group], mixed_ML=loads.mixed_GML[group],
            cluster=planning.cluster_of(strategy), settings="{}",
        )
        for group in range(step.groups)
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(18))
def test_no_simpler_strategy_is_predicted_to_be_faster(seed: int) -> None:
    step = random_step(seed, unknown=seed % 4 == 3)
    costs = costs_of(seed, step.cluster)
    planned = step.plan(costs=costs)
    assert planned.schedule.num_micro_steps <= 4
    chosen_s = seconds_of(step, planned, planned.plans, costs)
    assert chosen_s == pytest.approx(planned.predicted_s, rel=EXACT)
    slots = step.cluster.slots_per_rank
    anywhere = (Strategy(replicas=ANY, slots=slots, exposed=exposed, sends=sends) for exposed, sends in WAYS)
    simpler = [NOTHING, Strategy(replicas=NEAR, slots=slots), *anywhere]
    simpler += [replace(strategy, mirror=True) for strategy in simpler[1:]]
    for strategy in simpler:
        other_s = seconds_of(step, planned, planned_as(step, planned, strategy, costs), costs)
        # What planning itself takes is part of the choice.
        assert chosen_s <= other_s * (1 + EXACT) + planning_seconds(step), strategy
    nothing_s = seconds_of(step, planned, planned_as(step, planned, NOTHING, costs), costs)
    assert chosen_s <= nothing_s * (1 + EXACT)
    assert planned.strategies_s["nothing"] == pytest.approx(nothing_s, rel=EXACT)


def planning_seconds(step: Step) -> float:
    """More than what planning such a step is estimated to take."""
    experts, layers, cells = 32, 3, step.groups * 4 * step.cluster.ranks * 32
    return (2e-7 * cells + 1e-7 * experts**2) * layers / step.cluster.planning_threads


@pytest.mark.parametrize("forwards", [False, True])
def test_a_split_by_links_takes_longer_to_plan_with_more_slots(forwards: bool) -> None:
    """On two nodes; where tokens are sent, slots make no difference."""
    step, planning_s = random_step(1), []
    schedule = step.plan().schedule
    loads = StepLoads.of_sequences(step.sequences, schedule, step.cluster.ranks)
    for slots in (1, 2):
        cluster = replace(step.cluster, slots_per_rank=slots, dispatch_forwards=forwards)
        planning = StepPlanning(loads, step.placement, cluster, step.settings, free_replicas(cluster), None, threads=1)
        choice = choose_strategy(planning, may_move=False)
        assert choice.strategy.slots == slots
        planning_s.append(choice.prediction.parts_s["planning"])
    assert (planning_s[1] > planning_s[0] > 0) is not forwards


@pytest.mark.parametrize("seed", range(12))
def test_another_slot_never_makes_a_step_slower(seed: int) -> None:
    """With the same homes."""
    step = random_step(seed)
    costs = costs_of(1 + seed % 2, step.cluster)
    one, two = (
        step.plan(cluster=replace(step.cluster, slots_per_rank=slots), costs=costs, may_move=False).predicted_s
        for slots in (1, 2)
    )
    assert two <= one * (1 + EXACT)


@pytest.mark.parametrize("seed", range(6))
def test_the_fewest_slots_are_chosen_that_are_about_as_fast_as_any(seed: int) -> None:
    """Predicted seconds by number fall, and the plan is that with the chosen number alone."""
    step, numbers = random_step(seed), (1, 2, 4)
    costs = costs_of(seed, step.cluster)
    planned = step.plan(costs=costs, slots=numbers, may_move=False)
    seconds, chosen = planned.slots_s, planned.plan.slots_per_rank
    assert tuple(seconds) == numbers
    assert list(seconds.values()) == sorted(seconds.values(), reverse=True)
    worth = [number for number in numbers if seconds[number] <= 1.005 * seconds[4]]
    assert chosen == worth[0]
    alone = step.plan(cluster=replace(step.cluster, slots_per_rank=chosen), costs=costs, may_move=False)
    assert alone.chosen_strategy == planned.chosen_strategy
    assert np.array_equal(alone.plan.replica_ranks, planned.plan.replica_ranks)


def test_strategies_of_all_kinds_are_chosen_and_listed_by_their_seconds() -> None:
    chosen = []
    for seed in range(12):
        step = random_step(seed)
        planned = step.plan(costs=costs_of(seed, step.cluster))
        chosen.append(planned.chosen_strategy)
        assert list(planned.strategies_s.values()) == sorted(planned.strategies_s.values())
        assert {"nothing", planned.strategy, planned.runner_up} <= set(planned.strategies_s)
        assert planned.runner_up != planned.strategy
    assert {strategy.replicas for strategy in chosen} >= {NEAR, ANY}
    assert {strategy.homes for strategy in chosen} >= {STAY, STEP}


def test_a_step_is_planned_only_for_the_least_gain() -> None:
    step = random_step(1)
    costs = free_replicas(step.cluster)

    def strategy(gain: float) -> Strategy:
        return step.plan(costs=costs, settings=replace(step.settings, least_gain=gain)).chosen_strategy

    planned = step.plan(costs=costs)
    gain = 1 - planned.predicted_s / planned.strategies_s["nothing"]
    assert 0.01 < gain < 1
    assert strategy(0.0) == strategy(gain - 0.01) == planned.chosen_strategy != NOTHING
    assert strategy(gain + 0.01) == NOTHING
    # Below 0, steps are planned that take longer.
    dear = replace(costs, operations=costs.operations._replace(row_s=0.0, near_gradient_s=1.0, far_gradient_s=1.0))
    assert step.plan(costs=dear, may_move=False).chosen_strategy == NOTHING
    forced = step.plan(costs=dear, may_move=False, settings=replace(step.settings, least_gain=-1e6))
    assert forced.chosen_strategy != NOTHING


def most_rows(step: Step, planned: PlannedStep) -> int:
    """Of any rank in any instance."""
    workloads = step.workloads(planned.schedule)
    return max(int(plan.rank_loads(load).max()) for plan, load in zip(planned.plans, workloads, strict=True))


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_rows_above_a_limit_force_the_fastest_strategy_that_keeps_to_it(seed: int) -> None:
    """Replicas take longer than they save, so that nothing is done without the limit."""
    step = random_step(seed)
    costs = with_operations(free_replicas(step.cluster), near_gradient_s=1.0, far_gradient_s=1.0)
    free = step.plan(costs=costs, may_move=False)
    assert free.chosen_strategy == NOTHING
    limit = most_rows(step, free) - 1
    limited = replace(step.settings, max_rows_per_rank=limit)
    planned = step.plan(costs=costs, may_move=False, settings=limited)
    assert most_rows(step, planned) <= limit
    name, seconds = planned.strategy, planned.strategies_s
    assert list(seconds)[:2] == ["nothing", name]
    assert planned.predicted_s == pytest.approx(seconds[name])


@pytest.mark.parametrize("seed", range(1, 6))
def test_homes_stay_where_moves_are_not_allowed(seed: int) -> None:
    step = random_step(seed)
    costs = free_moves_only(step.cluster)
    free, fixed = (step.plan(costs=costs, may_move=may) for may in (True, False))
    assert np.array_equal(fixed.placement.home, step.placement.home)
    assert fixed.chosen_strategy.homes == STAY
    assert not np.array_equal(free.placement.home, step.placement.home)
    assert all("re-home" not in name for name in fixed.strategies_s)


@settings(max_examples=25)
@given(steps())
def test_plans_follow_the_strategy_that_their_settings_name(step: Step) -> None:
    planned = step.plan()
    strategy = planned.chosen_strategy
    for plan in planned.plans:
        assert json.loads(plan.settings)["strategy"] == strategy.name
        assert strategy.replicas != NONE or plan.num_replicas == 0
        assert strategy.replicas != NEAR or not plan.far_replicas.any()
        assert strategy.mirror or not plan.replica_paths.any()
    assert strategy.homes != STAY or np.array_equal(planned.placement.home, step.placement.home)
    # The imbalance before is that of the homes as they were.
    loads = np.stack([load.home_loads(step.placement.home) for load in step.workloads(planned.schedule)])
    means = np.maximum(loads.mean(axis=-1), 1e-9)
    ratios = np.where(loads.any(axis=-1), loads.max(axis=-1) / means, 1.0)
    assert planned.max_vio_before == pytest.approx(ratios.mean() - 1)


@pytest.mark.parametrize("may_move", [False, True])
def test_what_takes_longer_to_plan_than_it_saves_is_not_planned(may_move: bool) -> None:
    """Planning takes as long as ever, the rest of the step a millionth."""
    step = random_step(1)
    costs = free_moves_only(step.cluster) if may_move else free_replicas(step.cluster)
    assert step.plan(costs=costs, may_move=may_move).chosen_strategy != NOTHING
    seconds = {name: value / 1e6 for name, value in costs.operations._asdict().items() if name.endswith("_s")}
    assert step.plan(costs=with_operations(costs, **seconds), may_move=may_move).chosen_strategy == NOTHING


def test_moves_are_made_if_they_pay_over_the_steps_of_their_life() -> None:
    """Moves that take longer than they save in a step, and less than in a hundred of them."""
    step = random_step(2)
    costs = free_moves_only(step.cluster)
    free = step.plan(costs=costs)
    saved_s = free.strategies_s["nothing"] - free.predicted_s
    near_L, far_L = step.placement.moves(free.placement, step.cluster.ranks_per_node)
    assert near_L.sum() + far_L.sum() > 0
    # Twice what they save, if one rank sends or gets them all.
    state_s = 2 * saved_s * 8 / (near_L.sum() + far_L.sum())
    dear = with_operations(costs, near_state_s=state_s, far_state_s=state_s)
    for life, moves in ((1, False), (100, True)):
        planned = step.plan(costs=dear, settings=replace(step.settings, move_life=life))
        assert (planned.chosen_strategy.homes != STAY) == moves, life
        assert np.array_equal(planned.placement.home, step.placement.home) != moves
    # A hundredth of the move counts.
    assert np.array_equal(planned.placement.home, free.placement.home)
    counted_s = planned.strategies_s[planned.chosen_strategy.name]
    assert counted_s == pytest.approx(free.predicted_s + (planned.predicted_s - free.predicted_s) / 100)


def test_past_loads_are_used_if_the_same_experts_stay_hot() -> None:
    """A move lives for as many past steps as homes for their loads save what homes for this step's loads save, and for
    100 steps if that holds for all of them. If loads have just changed, it lives for as long as those before lasted."""
    step = random_step(2)
    layers, experts = step.placement.home.shape
    step = replace(step, placement=Placement.contiguous(layers, experts, step.cluster.ranks))
    costs = free_moves_only(step.cluster)
    settings_ = replace(step.settings, move_life=None)
    same = step.sequences.counts_SLE.sum(axis=0, dtype=np.int64)
    other = same[:, ::-1].copy()
    pasts = [same], [same] * 3, [same] * 12, [same, other, same, same], [other], [other] * 3, [other] * 12
    changing = [same, other, same, other], [same, same, other, other]
    for past, life in zip((*pasts, *changing), (100, 100, 100, 2, 1, 3, 8, 1, 2), strict=True):
        planned = step.plan(costs=costs, settings=settings_, past_PLE=np.stack(past))
        assert planned.chosen_strategy.homes != STAY
        assert planned.move_life == life
    assert step.plan(costs=costs, settings=settings_).move_life == 1
    assert step.plan(costs=costs, settings=settings_, past_PLE=np.stack([same])[:0]).move_life == 1
    # Where present homes are good, loads have not changed: what is left to gain is of this step alone.
    noisy_LE = (same * np.exp(0.2 * np.random.default_rng(3).normal(size=same.shape))).astype(np.int64)
    homes = [place_experts(noisy_LE[layer][None], home_E, 8, 4) for layer, home_E in enumerate(step.placement.home)]
    good = replace(step, placement=Placement(np.stack(homes)))
    planned = good.plan(costs=costs, settings=settings_, past_PLE=np.stack([other] * 3))
    assert planned.chosen_strategy.homes != STAY
    assert planned.move_life == 1


def test_homes_are_those_for_the_loads_of_all_groups() -> None:
    loads_G = [Workload.known(np.full((2, 1, 3, 4), group + 1, np.int32)) for group in range(2)]
    nothing = np.zeros(0, np.int32)
    loads = StepLoads.of_workloads(loads_G, Schedule(nothing, nothing, np.zeros(2, np.int32), 6))
    (counts_ME,) = loads.expert_counts(np.arange(2), np.arange(1))
    assert counts_ME.tolist() == [[3] * 4] * 2 + [[6] * 4] * 2


def test_without_replicas_sequences_are_grouped_by_routing_if_that_is_faster() -> None:
    """Some steps gain, and none loses."""
    faster = 0
    for seed in range(10):
        step = random_step(seed, sequences=96)
        cluster = replace(step.cluster, slots_per_rank=0)
        costs = free_replicas(cluster)
        planned = step.plan(cluster=cluster, costs=costs, may_move=False)
        sequences, budget = step.sequences, step.token_budget
        packed = pack_by_length(
            sequences.lengths, num_ranks=8 * step.groups, token_budget=budget, mini_batch=step.mini_batch
        )
        schedule = pack_by_time(packed, sequences.lengths, sequences.top_k, cluster, costs, budget)
        alone = plan_schedule(
            StepLoads.of_workloads(step.workloads(schedule), schedule, sequences.lengths), schedule, step.placement,
            cluster, settings=step.settings, costs=costs, may_move=False,
        )  # fmt: skip
        assert planned.predicted_s <= alone.predicted_s * (1 + EXACT)
        faster += planned.predicted_s < alone.predicted_s
    assert faster >= 1
