"""Figures of a plan equal plain counts of its rows, moves and replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import trimtab
from trimtab import ModelSpec, RoutingTrace
from trimtab.api.plan_result import PlanResult
from trimtab.planner.plan.step_times import moving_seconds
from trimtab.planner.replicas.paths import HOST
from trimtab.policies import POLICIES
from trimtab.trace import PRESETS, synthesize, synthesize_preset

MODEL = ModelSpec("m", num_experts=16, top_k=4, hidden_size=128, expert_width=64, moe_layers=2)
RANKS, PER_NODE = 4, 2


def some_trace() -> RoutingTrace:
    """Two steps of 12 sequences of 32 tokens, with a token without a route in one layer in each."""
    trace = synthesize(num_sequences=24, sequence_length=32, num_layers=2, num_experts=16, top_k=4, zipf=1.2)
    trace.expert_ids[[40, 500], 1] = trace.no_route
    return replace(trace, steps=np.repeat([5, 8], 12).astype(np.int32))


def planned(policy: str, **changes: Any) -> PlanResult:
    sizes: dict[str, Any] = {"ranks": RANKS, "ranks_per_node": PER_NODE, "slots": 1, "token_budget": 64} | changes
    return trimtab.plan(some_trace(), trimtab.Run(model=MODEL, **sizes), policy=policy)


def test_the_last_step_is_planned_unless_another_is_named() -> None:
    assert set(planned("static").trace.steps.tolist()) == {8}
    assert set(planned("static", step=5).trace.steps.tolist()) == {5}


def test_loads_and_rows_between_nodes_without_a_plan() -> None:
    result = planned("static")
    trace, schedule = result.trace, result.plan.schedule
    loads = np.zeros((result.plan.num_micro_steps, 2, RANKS), int)
    far = rows = unknown = 0
    for s in range(trace.num_sequences):
        for (_, layer, _), expert in np.ndenumerate(trace.sequence(s)):
            if expert == trace.no_route:
                unknown += 1
                continue
            home = expert // (16 // RANKS)
            loads[schedule.micro_step[s], layer, home] += 1
            rows += 1
            far += home // PER_NODE != schedule.rank[s] // PER_NODE
    assert unknown == 4
    assert result.unknown_row_fraction == 4 / (12 * 32 * 2 * 4)
    assert result.mixed_instances == np.count_nonzero(result.plan.mixed_ML[:, 1]) == 1
    assert "unknown routes" in dict(result.facts)
    known = trimtab.plan(trace.select(np.arange(4, 12)), trimtab.Run(ranks=RANKS, token_budget=64))
    assert (known.mixed_instances, known.unknown_row_fraction) == (0, 0.0)
    assert "unknown routes" not in dict(known.facts)
    # Rows without a recorded expert are estimated.
    assert np.abs(result.loads_before_MLR - loads).sum() == 4
    assert np.array_equal(result.loads_before_MLR, result.loads_after_MLR)
    assert result.cross_node_before == result.cross_node_after == pytest.approx(far / rows, abs=4 / rows)
    assert (result.expert_time_saved, result.plan.num_replicas, result.weight_bytes_per_micro_step) == (0, 0, 0)


def test_sequences_without_tokens_change_nothing() -> None:
    trace, result = some_trace(), planned("static")
    none = RoutingTrace.from_sequences([np.zeros((0, 2, 4), int)] * 30, num_experts=16, steps=8)
    more = trimtab.plan(
        RoutingTrace.concatenate([none, trace]),
        trimtab.Run(model=MODEL, ranks=RANKS, ranks_per_node=PER_NODE, slots=1, token_budget=64),
        policy="static",
    )
    assert np.array_equal(more.loads_after_MLR, result.loads_after_MLR)


def test_savings_moves_and_bytes_of_a_plan() -> None:
    result = planned("eplb_oracle")
    plan, before, after = result.plan, result.loads_before_MLR, result.loads_after_MLR
    assert after.sum() == before.sum()
    assert 0 < result.expert_time_saved == pytest.approx(1 - after.max(axis=2).sum() / before.max(axis=2).sum())
    assert result.balance_before.mean == pytest.approx((before.max(axis=2) / before.mean(axis=2)).mean())
    assert result.balance_after.p99 == pytest.approx(np.percentile(after.max(axis=2) / after.mean(axis=2), 99))
    inside = between = 0
    for homes in plan.home:
        for expert, rank in enumerate(homes.tolist()):
            old = expert // (16 // RANKS)
            inside += rank != old and rank // PER_NODE == old // PER_NODE
            between += rank // PER_NODE != old // PER_NODE
    assert (result.moves_inside_nodes, result.moves_between_nodes) == (inside, between)
    assert inside
    assert between
    replicas = far = 0
    for m, layer in np.ndindex(plan.num_micro_steps, 2):
        for replica in plan.replicas_of(m, layer):
            home = plan.home[layer, plan.replica_experts[replica]]
            replicas += 1
            far += home // PER_NODE != plan.replica_ranks[replica] // PER_NODE
    assert 0 < far == result.far_replicas
    assert replicas == plan.num_replicas
    assert 0 < result.host_replicas == plan.replica_paths.tolist().count(HOST) < replicas
    # Three matrices of 128 x 64 weights of 2 bytes.
    assert result.weight_bytes_per_micro_step == replicas * 3 * 128 * 64 * 2 / plan.num_micro_steps
    assert result.num_instances == plan.num_micro_steps * 2
    assert result.us_per_instance == pytest.approx(1e6 * result.planning_s / (plan.num_micro_steps * 2))
    assert result.figures()["replicas_per_instance"] == replicas / (plan.num_micro_steps * 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"ranks": 8},
        {"ranks": 16, "micro_steps": 3, "recompute": False},
        {"ranks": 16, "groups": 2, "recompute_granularity": "full", "slots": 1},
        {"ranks": 8, "groups": 4, "micro_steps": 8},
        {"ranks": 8, "groups": 8, "micro_steps": 8},
        {"ranks": 16, "groups": 4, "micro_steps": 4, "recompute": False},
        {"ranks": 32, "cluster": "a100x8", "token_budget": 4096, "dispatcher": "tokens"},
    ],
)
def test_predicted_seconds_are_those_of_the_simulator(settings: dict[str, Any]) -> None:
    trace = synthesize_preset(
        PRESETS["qwen3-30b-math"], num_sequences=192, mean_length=1024, max_length=2048, num_layers=2
    )
    settings = settings | {"model": "qwen3-30b-a3b"}
    result = trimtab.plan(trace, trimtab.Run(**settings))
    recorded = {} if "micro_steps" in settings else {"sampled": 1.0}
    simulated = trimtab.simulate(
        trace, trimtab.Run(**{"recompute_granularity": "none"} | settings | recorded), policies="trimtab"
    )
    outcome = simulated.cases[0].outcomes["trimtab"]
    assert result.plan.num_micro_steps == outcome.plan.num_micro_steps
    # Groups with one or two micro-steps wait for the largest; the prediction has their mean.
    error = 0.04 if settings.get("groups", 1) > 2 else 0.03
    assert result.predicted_seconds[result.strategy] == pytest.approx(outcome.simulated.step_time_s, rel=error)


def test_predicted_seconds_include_planning_that_ranks_wait_for() -> None:
    """Of this step it is 0.7%."""
    trace = synthesize(num_sequences=64, sequence_length=256, num_layers=3, num_experts=128, top_k=8, zipf=0.8)
    settings: dict[str, Any] = {"ranks": 8, "micro_steps": 2, "model": "qwen3-30b-a3b"}
    result = trimtab.plan(trace, trimtab.Run(**settings))
    simulated = (
        trimtab.simulate(trace, trimtab.Run(recompute_granularity="none", **settings), policies="trimtab")
        .outcomes["trimtab"]
        .simulated
    )
    assert simulated.parts_s["planning"] > 0.006 * simulated.step_time_s
    assert result.predicted_seconds[result.strategy] == pytest.approx(simulated.step_time_s, rel=0.005)


def test_groups_share_out_micro_steps_but_no_moves_and_no_optimizer() -> None:
    trace = synthesize_preset(
        PRESETS["qwen3-30b-math"], num_sequences=96, mean_length=1024, max_length=2048, num_layers=2
    )
    alone = trimtab.plan(trace, trimtab.Run(ranks=8, slots=0, micro_steps=4, model="qwen3-30b-a3b"))
    assert alone.costs
    homes, operations = alone.plan.home, alone.costs.operations
    moving_s = moving_seconds(alone.static_plan.home, homes, alone.cluster.ranks_per_node, operations)
    assert moving_s > 0
    [together_s, one_each_s] = (
        replace(alone, groups=groups).predicted_seconds[alone.strategy] for groups in (1, alone.num_micro_steps)
    )
    planning = POLICIES["trimtab"].traits.hidden_planning(
        alone.plan, alone.workload_after, trace.sequence_lengths, alone.cluster, 48
    )
    planning_s = planning.header_s + planning.round_s
    assert planning_s > 0
    once_s = planning_s + 24 * (moving_s + operations.optimizer_s)
    assert one_each_s == pytest.approx(once_s + (together_s - once_s) / alone.num_micro_steps, rel=1e-6)
