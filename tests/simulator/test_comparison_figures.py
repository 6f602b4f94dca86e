"""Figures of simulated balancers: balance, seconds, bytes, the fastest, and what tables and JSON say of them."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from helpers.comparison_cases import MODEL, some_case, some_trace
from helpers.reference_flows import flows_of
from trimtab import ClusterSpec, Placement
from trimtab.cluster.operations import OperationCosts
from trimtab.policies.planning_time import MEASURED
from trimtab.report.simulation import answer, policy_results
from trimtab.simulator.comparison import (
    Outcome,
    figures,
    operations,
    simulate_policy,
)
from trimtab.simulator.expert_time import expert_time, summarise_balance
from trimtab.simulator.memory import RankLoad, rank_memory, replica_pool_bytes
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
        return SimulatedCase(4, 1, None, cramped, outcomes, (), {}).fastest

    assert fastest(1e12) == "llep"
    assert fastest(1e8) == "trimtab"
    assert fastest(1e6) == "llep"


def test_figures_have_the_documented_keys_and_values() -> None:
    case = some_case()
    outcomes = {name: simulate_policy(case, name) for name in ("static", "trimtab", "balanced")}
    found = figures(case, outcomes)
    assert list(found) == ["static", "trimtab", "balanced"]
    for name, row in found.items():
        assert row.keys() >= KEYS
        outcome: Outcome = outcomes[name]
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
        assert row["memory_bytes"]["experts"] == sum(row["state_bytes"]["experts"].values())
        assert row["memory_bytes"]["dense parts"] == sum(row["state_bytes"]["dense parts"].values())
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
    """Part of the rows whose home is on another node than they are."""
    counts_MLRE = outcome.workload.token_counts_MLRE
    far = [
        tokens
        for (_, layer, source, e), tokens in np.ndenumerate(counts_MLRE)
        if source // 2 != outcome.plan.home[layer, e] // 2
    ]
    return sum(far) / counts_MLRE.sum()


@pytest.mark.parametrize("name", ["eplb_oracle", "laer", "foremoe"])
def test_an_outcome_covers_the_layers_of_the_trace(name: str) -> None:
    trace = some_trace(steps=(0,) * 7, longer=300)
    model = replace(MODEL, moe_layers=4)
    run_as = StepSettings(groups=2, ring_layers=2)
    case = some_case(trace, model=model, settings=run_as, token_budget=400)
    outcome = simulate_policy(case, name)
    plan, workload, cluster = outcome.plan, outcome.workload, case.cluster
    assert plan.num_micro_steps > 1
    assert plan.num_replicas > 0
    row = figures(case, {name: outcome})[name]
    # Of the whole model, which has twice the layers.
    assert row["weight_bytes_per_micro_step"] == 2 * plan.num_replicas * model.expert_bytes / plan.num_micro_steps
    moved = int((plan.home != Placement.contiguous(2, 8, 4).home).sum())
    assert row["migration_bytes_per_step"] == 2 * moved * model.expert_parameters * (2 + 12)
    instances = np.ndindex(plan.num_micro_steps, plan.num_layers)
    far = sum(
        flow.rows
        for at in instances
        for flow in flows_of(plan, workload.token_counts_MLRE[at], *at)
        if flow.source // 2 != flow.rank // 2
    )
    assert row["cross_node_token_fraction"] == far / workload.token_counts_MLRE.sum()
    costs = OperationCosts.of(cluster, model, moe_layers=2, groups=2)
    expected = simulate_step(
        plan, workload, trace.sequence_lengths, costs, cluster, outcome.policy.traits,
        before=Placement.contiguous(2, 8, 4),
        settings=run_as,
        model_layers=model.moe_layers,
    )  # fmt: skip
    assert outcome.simulated.parts_s == {part: 2 * seconds for part, seconds in expected.parts_s.items()}
    assert outcome.simulated.step_time_s == 2 * expected.step_time_s
    # Timelines show what was simulated.
    assert operations(case, outcome, 0).spans_N2.max() < expected.step_time_s
    tokens_MR = np.zeros((plan.num_micro_steps, 4), np.int64)
    for s, length in enumerate(trace.sequence_lengths):
        tokens_MR[plan.micro_step[s], plan.rank[s]] += length
    load = RankLoad(
        layers=2,
        homes_R=np.array([(plan.home == r).sum() for r in range(4)]),
        tokens_MR=tokens_MR,
        rows_MLR=expected.work.loads_MLR,
        pool_R=replica_pool_bytes(plan, model, outcome.policy.traits, 2),
    )
    assert outcome.memory == rank_memory(load, model, groups=2)
    choices: dict[str, Any] = {"sharding": "fsdp", "checkpointing": True}
    other = simulate_policy(replace(case, settings=replace(run_as, **choices)), name)
    assert other.memory == rank_memory(load, model, groups=2, **choices)
    assert other.simulated.step_time_s > outcome.simulated.step_time_s
    sharded = simulate_policy(replace(case, settings=replace(run_as, sharding="fsdp")), name)
    assert sharded.simulated.parts_s == outcome.simulated.parts_s
    # Planning is that of all layers of the model.
    traits = outcome.policy.traits
    hidden = traits.hidden_planning(plan, workload, trace.sequence_lengths, cluster, model.moe_layers)
    exposed_s, hidden_s = outcome.simulated.parts_s["planning"], outcome.simulated.hidden_planning_s
    assert hidden_s == 2 * expected.hidden_planning_s
    # Two groups, each with a round for every second micro-step.
    rounds_s = -(-plan.num_micro_steps // 2) * hidden.round_s
    assert exposed_s + hidden_s == pytest.approx(hidden.header_s + hidden.rollout_s + rounds_s)
    assert (exposed_s > 0) == (hidden_s > 0) == (name != "laer")


def test_seconds_of_a_partial_trace_keep_their_ratios() -> None:
    """The model's layers like those of the trace: seconds of the whole model are those of a trace of all layers."""
    trace = some_trace(longer=100)
    twice = np.tile(trace.expert_ids, (1, 2, 1))
    doubled = replace(trace, expert_ids=twice, layer_indices=np.arange(4, dtype=trace.layer_indices.dtype))
    model = replace(MODEL, moe_layers=4)
    for name in ("static", "eplb_oracle", "trimtab", "balanced"):
        part = simulate_policy(some_case(trace, model=model, token_budget=220), name)
        whole = simulate_policy(some_case(doubled, model=model, token_budget=220), name)
        assert part.simulated.step_time_s == pytest.approx(whole.simulated.step_time_s, rel=0.05)
        assert part.simulated.parts_s["planning"] == pytest.approx(whole.simulated.parts_s["planning"], rel=0.05)
        assert sum(part.simulated.parts_s.values()) == pytest.approx(part.simulated.step_time_s)
        assert part.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.02)


def test_recording_operations_does_not_change_the_step() -> None:
    case = some_case()
    outcome = simulate_policy(case, "static")
    for micro_step in range(outcome.plan.num_micro_steps):
        shown = operations(case, outcome, micro_step)
        assert len(shown.rank_N) == len(shown.kind_N) > 0
        assert set(shown.rank_N.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("changes", "confined"),
    [({}, True), ({"equal_terms": True}, False), ({"cluster": ClusterSpec(4, 4, 1)}, False)],
)
def test_tables_and_json_state_which_balancers_stay_inside_the_node(changes: dict[str, Any], confined: bool) -> None:
    case = some_case(**changes)
    names = ("static", "eplb", "ultraep", "feplb", "relibra", "moonep", "llep", "trimtab", "balanced")
    outcomes = {name: simulate_policy(case, name) for name in names}
    simulated = SimulatedCase(4, 1, None, case, outcomes, names, {})
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
    text = answer(SimulatedCase(4, 1, None, case, outcomes, tuple(outcomes), times))
    assert (
        "trimtab makes the step 0.50 times as fast as static; static is faster: 50.0% less time than trimtab." in text
    )
