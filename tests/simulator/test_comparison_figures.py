"""Figures of simulated balancers: balance, seconds, bytes, the fastest, and what tables and JSON say of them."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from helpers.comparison_cases import MODEL, some_case, some_trace
from helpers.reference_flows import flows_of, loads_of, peak_bytes
from trimtab import ClusterSpec, Placement
from trimtab.cluster.operations import OperationCosts
from trimtab.planner.plan.step_times import moving_seconds
from trimtab.policies.planning_time import MEASURED
from trimtab.report.simulation import answer, policy_results
from trimtab.simulator.comparison import Outcome, figures, operations, simulate_policy
from trimtab.simulator.expert_time import expert_time, summarise_balance
from trimtab.simulator.memory import rank_memory, replica_pool_bytes
from trimtab.simulator.simulated_case import SimulatedCase
from trimtab.simulator.step import StepSettings, simulate_step

# Documented keys.
KEYS = {
    "known_at", "slots_per_rank", "step_time_s", "speedup_vs_static", "fraction_of_balanced", "max_over_mean",
    "replicas_per_instance", "weight_bytes_per_micro_step", "cross_node_token_fraction", "exposed_transfer_s",
    "exposed_planning_s", "migration_bytes_per_step", "plan_us_per_instance", "replica_pool_bytes",
    "peak_tokens_per_rank", "peak_bytes_per_rank", "fits", "speedup_vs_eplb", "mirror_bytes_per_node", "memory_bytes",
    "state_bytes", "within_node", "planning_time", "hidden_planning_s",
}  # fmt: skip


def test_balance_is_that_of_instances() -> None:
    """101 instances, the busiest of two ranks 1.00, 1.01 and so on up to 2 times the mean."""
    above = np.arange(101)
    balance = summarise_balance(np.stack([100 + above, 100 - above], axis=1)[:, None])
    assert asdict(balance) == pytest.approx({"mean": 1.5, "p50": 1.5, "p99": 1.99, "max": 2.0})
    assert expert_time(np.array([[[3, 1], [2, 5]], [[4, 4], [0, 7]]])) == 3 + 5 + 4 + 7


def test_the_fastest_balancer_is_one_that_fits() -> None:
    """The ideal run is none. If nothing fits, it is the fastest of all."""
    case = some_case()
    seconds = {"static": 3.0, "llep": 1.0, "trimtab": 2.0, "balanced": 0.5}
    outcomes = {name: simulate_policy(case, name) for name in seconds}
    for name, outcome in outcomes.items():
        simulated = replace(outcome.simulated, step_time_s=seconds[name])
        size = 10**9 if name == "llep" else 10**7
        outcomes[name] = replace(outcome, simulated=simulated, memory=outcome.memory | {"activations": size})

    def fastest(device_bytes: float) -> str:
        cramped = replace(case, cluster=replace(case.cluster, device_bytes=device_bytes))
        return SimulatedCase(4, 1, None, cramped, outcomes, {}, 0.0).fastest

    assert fastest(1e12) == "llep"
    assert fastest(1e8) == "trimtab"
    assert fastest(1e6) == "llep"


def test_figures_have_the_documented_keys_and_values() -> None:
    case = some_case()
    outcomes = {name: simulate_policy(case, name) for name in ("static", "trimtab", "balanced")}
    found = figures(case, outcomes)
    assert list(found) == list(outcomes)
    for name, row in found.items():
        assert row.keys() >= KEYS
        outcome = outcomes[name]
        seconds = outcome.simulated.step_time_s
        assert row["step_time_s"] == seconds == pytest.approx(sum(row["parts_s"].values()))
        assert row["speedup_vs_static"] == found["static"]["step_time_s"] / seconds
        assert row["fraction_of_balanced"] == found["balanced"]["step_time_s"] / seconds
        assert row["exposed_transfer_s"] == row["parts_s"]["transfers"]
        assert row["exposed_planning_s"] == row["parts_s"]["planning"]
        assert row["hidden_planning_s"] == outcome.simulated.hidden_planning_s
        assert (row["hidden_planning_s"] > 0) == (name == "trimtab")
        plan, loads_MLR = outcome.plan, outcome.simulated.work.loads_MLR
        instances = plan.num_micro_steps * 2
        assert row["replicas_per_instance"] == plan.num_replicas / instances
        assert row["weight_bytes_per_micro_step"] == plan.num_replicas * MODEL.expert_bytes / plan.num_micro_steps
        assert row["peak_tokens_per_rank"] == loads_MLR.max()
        ratios = loads_MLR.max(axis=-1) / loads_MLR.mean(axis=-1)
        assert row["max_over_mean"]["mean"] == pytest.approx(ratios.mean())
        assert row["max_over_mean"]["max"] == pytest.approx(ratios.max())
        assert row["micro_steps"] == plan.num_micro_steps
        assert row["replica_pool_bytes"] == row["memory_bytes"]["replica pool"]
        assert row["peak_bytes_per_rank"] == sum(row["memory_bytes"].values()) == outcome.peak_bytes
        for part in ("experts", "dense parts"):
            assert row["memory_bytes"][part] == sum(row["state_bytes"][part].values())
        assert row["speedup_vs_eplb"] is None
        assert row["fits"]
    assert found["trimtab"]["exposed_planning_s"] > 0
    assert found["static"]["cross_node_token_fraction"] == far_part(outcomes["static"])
    assert found["balanced"]["max_over_mean"]["max"] == 1.0
    without = figures(case, {"trimtab": outcomes["trimtab"]})["trimtab"]
    assert (without["speedup_vs_static"], without["fraction_of_balanced"]) == (None, None)
    outcomes["eplb"] = simulate_policy(case, "eplb")
    found = figures(case, outcomes)
    ratio = outcomes["eplb"].simulated.step_time_s / outcomes["trimtab"].simulated.step_time_s
    assert found["trimtab"]["speedup_vs_eplb"] == ratio
    # A device with as much memory as is needed, and with a byte less.
    outcome = replace(outcome, memory=outcome.memory | {"activations": 10**7})
    for device_bytes, is_enough in ((outcome.peak_bytes, True), (outcome.peak_bytes - 1, False)):
        cramped = replace(case, cluster=replace(case.cluster, device_bytes=device_bytes))
        assert figures(cramped, {name: outcome})[name]["fits"] == is_enough


def far_part(outcome: Outcome) -> float:
    """Part of the rows that are computed on another node than the token's."""
    plan, counts_MLRE = outcome.plan, outcome.workload.token_counts_MLRE
    instances = np.ndindex(plan.num_micro_steps, plan.num_layers)
    flows = [flow for at in instances for flow in flows_of(plan, counts_MLRE[at], *at)]
    return float(sum(flow.rows for flow in flows if flow.source // 2 != flow.rank // 2) / counts_MLRE.sum())


@pytest.mark.parametrize("name", ["eplb_oracle", "laer", "foremoe"])
def test_an_outcome_covers_the_layers_of_the_trace(name: str) -> None:
    trace = some_trace(steps=(0,) * 7, longer=1500)
    model = replace(MODEL, moe_layers=4)
    run_as = StepSettings(groups=2, ring_layers=2)
    case = some_case(trace, model=model, settings=run_as, token_budget=2000)
    outcome = simulate_policy(case, name)
    plan, workload, cluster = outcome.plan, outcome.workload, case.cluster
    assert plan.num_micro_steps > 1
    assert plan.num_replicas > 0
    row = figures(case, {name: outcome})[name]
    # Of the whole model, which has twice the layers; each of two groups moves its shard of the optimizer state.
    assert row["weight_bytes_per_micro_step"] == 2 * plan.num_replicas * model.expert_bytes / plan.num_micro_steps
    assert row["migration_bytes_per_step"] == 0  # only first moves
    assert row["cross_node_token_fraction"] == far_part(outcome)
    costs = OperationCosts.of(cluster, model, moe_layers=2, groups=2)
    expected = simulate_step(
        plan, workload, trace.sequence_lengths, costs, cluster, outcome.policy.traits,
        settings=run_as, model=model,
    )  # fmt: skip
    moving_s = moving_seconds(Placement.contiguous(2, 8, 4).home, plan.home, cluster.ranks_per_node, costs)
    assert row["first_moves_s"] == outcome.first_moves_s == 2 * moving_s
    assert outcome.simulated.parts_s == {part: 2 * seconds for part, seconds in expected.parts_s.items()}
    assert outcome.simulated.step_time_s == 2 * expected.step_time_s
    # Timelines show what was simulated, on all ranks of both groups.
    shown = operations(case, outcome, 0)
    assert shown.spans_N2.max() < expected.step_time_s
    assert set(shown.rank_N.tolist()) == set(range(8))
    loads_MLR = loads_of(plan, workload)
    pool_R = replica_pool_bytes(plan, model, outcome.policy.traits, 2)
    assert row["peak_tokens_per_rank"] == loads_MLR.max()
    most_bytes = peak_bytes(plan, loads_MLR, trace.sequence_lengths, model, groups=2, pool_R=pool_R)
    assert row["peak_bytes_per_rank"] == most_bytes
    choices: dict[str, Any] = {"sharding": "fsdp", "checkpointing": True}
    other = simulate_policy(replace(case, settings=replace(run_as, **choices)), name)
    assert other.memory == rank_memory(outcome.load, model, groups=2, **choices)
    assert other.simulated.step_time_s > outcome.simulated.step_time_s
    sharded = simulate_policy(replace(case, settings=replace(run_as, sharding="fsdp")), name)
    # A move costs a shard of the state.
    assert sharded.simulated.parts_s == outcome.simulated.parts_s
    if name == "eplb_oracle":
        assert 0 < sharded.first_moves_s < outcome.first_moves_s
    # Planning is that of all layers of the model.
    hidden = outcome.policy.traits.hidden_planning(plan, workload, trace.sequence_lengths, cluster, model.moe_layers)
    exposed_s, hidden_s = outcome.simulated.parts_s["planning"], outcome.simulated.hidden_planning_s
    assert hidden_s == 2 * expected.hidden_planning_s
    # Two groups, each with a round for every second micro-step.
    rounds_s = -(-plan.num_micro_steps // 2) * hidden.round_s
    assert exposed_s + hidden_s == pytest.approx(hidden.header_s + hidden.rollout_s + rounds_s)
    assert (exposed_s > 0) == (hidden_s > 0) == (name != "laer")


@pytest.mark.parametrize(
    ("changes", "confined"),
    [({}, True), ({"equal_terms": True}, False), ({"cluster": ClusterSpec(4, 4, 1)}, False)],
)
def test_tables_and_json_state_which_balancers_stay_inside_the_node(changes: dict[str, Any], confined: bool) -> None:
    case = some_case(**changes)
    names = ("static", "eplb", "ultraep", "feplb", "relibra", "moonep", "llep", "trimtab", "balanced")
    outcomes = {name: simulate_policy(case, name) for name in names}
    simulated = SimulatedCase(4, 1, None, case, outcomes, {}, 0.0)
    inside = {result.name for result in policy_results(simulated) if "copies stay inside the node" in result.about}
    assert inside == ({"ultraep", "feplb", "relibra", "moonep"} if confined else set())
    found = figures(case, outcomes)
    assert all(found[name]["within_node"] == (not case.equal_terms) for name in ("ultraep", "feplb", "relibra"))
    assert not any(found[name]["within_node"] for name in ("static", "llep", "trimtab"))
    assert found["trimtab"]["planning_time"] == MEASURED
    assert found["static"]["planning_time"] == found["eplb"]["planning_time"] == "none"
    assert "UltraEP" in found["llep"]["planning_time"]


def test_the_headline_says_when_nothing_is_faster_than_static() -> None:
    case = some_case()
    outcomes = {name: simulate_policy(case, name) for name in ("static", "trimtab", "balanced")}
    static = outcomes["static"].simulated
    slower = replace(static, step_time_s=2 * static.step_time_s)
    outcomes["trimtab"] = replace(outcomes["trimtab"], simulated=slower)
    times = {name: outcome.simulated.step_time_s for name, outcome in outcomes.items()}
    text = answer(SimulatedCase(4, 1, None, case, outcomes, times, 0.1))
    assert "static is faster: 50.0% less time than trimtab." in text
