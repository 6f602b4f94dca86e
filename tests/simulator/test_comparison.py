"""Comparison of balancers on one step: their input and their figures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from helpers.simulator_reference import flows_of
from trimtab import ClusterSpec, InputError, Placement, RoutingTrace, StepPlan
from trimtab.array_type import Array
from trimtab.cluster import ModelSpec
from trimtab.cluster.operations import OperationCosts
from trimtab.planner import SequenceCounts
from trimtab.policies import POLICIES, Traits, View
from trimtab.policies.planning_time import MEASURED
from trimtab.report.simulation import answer, policy_results
from trimtab.simulator.comparison import (
    ComparisonCase,
    Outcome,
    budget_for,
    figures,
    operations,
    permuted_step_times,
    simulate_policy,
    step_of,
    trace_hash,
)
from trimtab.simulator.expert_time import expert_time, summarise_balance
from trimtab.simulator.memory import RankLoad, rank_memory, replica_pool_bytes
from trimtab.simulator.simulated_case import SimulatedCase
from trimtab.simulator.step import StepSettings, simulate_step
from trimtab.trace.permuted_experts import permute_experts

# Documented keys.
KEYS = {
    "known_at", "slots_per_rank", "step_time_s", "speedup_vs_static", "fraction_of_balanced", "max_over_mean",
    "replicas_per_instance", "weight_bytes_per_micro_step", "cross_node_token_fraction", "exposed_transfer_s",
    "exposed_planning_s", "migration_bytes_per_step", "plan_us_per_instance", "replica_pool_bytes",
    "peak_tokens_per_rank", "peak_bytes_per_rank", "fits", "speedup_vs_eplb", "mirror_bytes_per_node", "memory_bytes",
    "state_bytes", "within_node", "planning_time",
}  # fmt: skip
MODEL = ModelSpec("small", num_experts=8, top_k=2, hidden_size=64, expert_width=32, moe_layers=2, vocab_size=100)


def some_trace(seed: int = 0, steps: tuple[int, ...] = (3, 3, 4, 4, 4, 7, 7), longer: int = 0) -> RoutingTrace:
    rng = np.random.default_rng(seed)
    skew_LE = rng.gumbel(size=(2, 8))
    ids = [
        np.argsort(-rng.gumbel(size=(10 + s + longer, 2, 8)) - skew_LE, axis=-1)[:, :, :2] for s in range(len(steps))
    ]
    trace = RoutingTrace.from_sequences(ids, num_experts=8)
    return replace(trace, steps=np.array(steps, trace.steps.dtype))


def some_case(trace: RoutingTrace | None = None, **changes: Any) -> ComparisonCase:
    step, earlier = step_of(some_trace() if trace is None else trace, None)
    values: dict[str, Any] = {
        "cluster": ClusterSpec(4, 2, 1),
        "model": MODEL,
        "sequences": SequenceCounts.from_trace(step),
        "earlier": tuple(map(SequenceCounts.from_trace, earlier)),
        "token_budget": 20,
    }
    return ComparisonCase(**values | changes)


def test_step_of_returns_a_step_and_those_before_it() -> None:
    trace = some_trace()
    step, earlier = step_of(trace, None)
    assert step.steps.tolist() == [7, 7]
    assert [part.steps.tolist() for part in earlier] == [[3, 3], [4, 4, 4]]
    assert np.array_equal(step.expert_ids, trace.select(np.array([5, 6])).expert_ids)
    step, earlier = step_of(trace, 3)
    assert (step.steps.tolist(), earlier) == ([3, 3], [])
    with pytest.raises(InputError, match="no step 5; the trace has steps 3 to 7"):
        step_of(trace, 5)


def test_the_budget_gives_about_the_requested_micro_steps() -> None:
    def lengths(*tokens: int) -> SequenceCounts:
        return SequenceCounts(
            np.zeros((len(tokens), 1, 2), np.uint16), np.array(tokens, np.int64), np.zeros((len(tokens), 1), np.int32)
        )

    # 80 tokens in 2 * 4 places, and a tenth more; the largest step decides.
    assert budget_for([lengths(*[10] * 8)], 2, 4) == 11
    assert budget_for([lengths(10), lengths(*[10] * 8), lengths(5, 5)], 2, 4) == 11
    # No less than the longest sequence of any step, and one token at least.
    assert budget_for([lengths(*[10] * 8)], 8, 4) == 10
    assert budget_for([lengths(10, 10), lengths(31)], 8, 4) == 31
    assert budget_for([lengths()], 2, 2) == 1


@dataclass(frozen=True)
class Spy:
    """Plans as `static`, and keeps what it was shown. As one that relocates it turns all homes round by one rank."""

    traits: ClassVar[Traits] = Traits(known_at="past", transfers_start="never", copies="none")
    seen: ClassVar[list[View]] = []

    def plan(self, view: View) -> StepPlan:
        self.seen.append(view)
        plan = POLICIES["static"].plan(view)
        return replace(plan, home=(plan.home + 1) % 4) if self.traits.relocates else plan


class Mover(Spy):
    traits = Traits(known_at="past", transfers_start="never", copies="none", relocates=True)
    seen: ClassVar[list[View]] = []


@pytest.fixture
def spies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Spy.seen.clear()
    Mover.seen.clear()
    monkeypatch.setitem(POLICIES, "spy", Spy())
    monkeypatch.setitem(POLICIES, "mover", Mover())
    yield
    Spy.seen.clear()
    Mover.seen.clear()


def past_of(*parts: SequenceCounts) -> Array:
    return np.stack([part.counts_SLE.sum(axis=0, dtype=np.int64) for part in parts])


@pytest.mark.usefixtures("spies")
def test_policies_get_past_counts_and_the_homes_that_they_reach_in_earlier_steps() -> None:
    case = some_case()
    outcome = simulate_policy(case, "spy")
    contiguous = Placement.contiguous(2, 8, 4)
    assert np.array_equal(Spy.seen[-1].past_counts_PLE, past_of(*case.earlier))
    assert np.array_equal(outcome.plan.home, contiguous.home)
    assert outcome.migration_bytes == 0
    # Who moves homes does so in all earlier steps, each of which sees those before it. Only what moves again counts.
    outcome = simulate_policy(case, "mover")
    first, second, now = Mover.seen
    assert first.past_counts_PLE.shape == (0, 2, 8)
    assert np.array_equal(first.placement.home, contiguous.home)
    assert len(first.mini_batch) == case.earlier[0].num_sequences
    assert np.array_equal(second.past_counts_PLE, past_of(case.earlier[0]))
    assert np.array_equal(second.placement.home, (contiguous.home + 1) % 4)
    assert len(second.mini_batch) == case.earlier[1].num_sequences
    assert np.array_equal(now.past_counts_PLE, past_of(*case.earlier))
    assert np.array_equal(now.placement.home, (contiguous.home + 2) % 4)
    assert np.array_equal(outcome.plan.home, (contiguous.home + 3) % 4)
    assert outcome.migration_bytes == 2 * 8 * MODEL.expert_parameters * (2 + 12)
    assert outcome.simulated.parts_s["migration"] > 0


def test_planning_time_is_in_microseconds_of_an_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Spy):
        def plan(self, view: View) -> StepPlan:
            time.sleep(0.05)
            return super().plan(view)

    monkeypatch.setitem(POLICIES, "slow", Slow())
    outcome = simulate_policy(some_case(token_budget=40), "slow")
    instances = outcome.plan.num_micro_steps * outcome.plan.num_layers
    assert instances > 1
    assert 0.05 <= outcome.plan_us * 1e-6 * instances < 5


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


@pytest.mark.usefixtures("spies")
def test_on_equal_terms_all_policies_get_the_same_input() -> None:
    case = some_case(equal_terms=True)
    simulate_policy(case, "mover")
    *_, now = Mover.seen
    assert now.equal_terms
    assert np.array_equal(now.placement.home, Placement.contiguous(2, 8, 4).home)
    plans = [simulate_policy(case, name).plan for name in ("static", "trimtab", "llep", "relibra", "eplb_oracle")]
    for plan in plans:
        assert np.array_equal(plan.home, plans[0].home)
        assert np.array_equal(plan.micro_step, plans[0].micro_step)
        assert np.array_equal(plan.rank, plans[0].rank)
        assert plan.slots_per_rank <= case.cluster.slots_per_rank
    own = simulate_policy(replace(case, equal_terms=False), "eplb_oracle").plan
    assert not np.array_equal(own.home, plans[0].home)


@pytest.mark.usefixtures("spies")
def test_a_first_step_has_no_past() -> None:
    case = some_case(some_trace(steps=(0,) * 7))
    outcome = simulate_policy(case, "mover")
    assert all(view.past_counts_PLE.shape == (0, 2, 8) for view in Mover.seen)
    # All homes move at once, from where they are without a balancer.
    assert outcome.migration_bytes == 2 * 8 * MODEL.expert_parameters * (2 + 12)


def test_sequences_are_assigned_to_mini_batches_in_order() -> None:
    case = some_case(some_trace(steps=(0,) * 7), mini_batches=3)
    outcome = simulate_policy(case, "static")
    assert outcome.plan.mini_batch_of_micro_step[outcome.plan.micro_step].tolist() == [0, 0, 0, 1, 1, 2, 2]
    # No more than there are sequences.
    most = simulate_policy(replace(case, mini_batches=100), "static").plan
    assert most.mini_batch_of_micro_step[most.micro_step].tolist() == list(range(7))
    assert most.num_micro_steps == 7


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
    # Planning before the step is that of all layers of the model.
    planning_s = outcome.policy.traits.planning_seconds(cluster, model.moe_layers, plan.num_micro_steps)
    assert outcome.simulated.parts_s["planning"] == pytest.approx(planning_s)
    assert (planning_s > 0) == (name != "laer")


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
        assert part.simulated.parts_s["planning"] == pytest.approx(whole.simulated.parts_s["planning"])
        assert sum(part.simulated.parts_s.values()) == pytest.approx(part.simulated.step_time_s)
        assert part.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.02)


def test_permuted_experts_change_static_and_not_the_ideal() -> None:
    case = some_case(some_trace(longer=300), token_budget=400)
    permuted = case.with_permuted_experts(3)
    for mine, other in zip((case.sequences, *case.earlier), (permuted.sequences, *permuted.earlier), strict=True):
        assert np.array_equal(other.counts_SLE, permute_experts(mine.counts_SLE, 3))
        assert np.array_equal(mine.lengths, other.lengths)
    found = permuted_step_times(case, ("static", "balanced"), 3)
    assert list(found) == ["static", "balanced"]
    static_s, balanced_s = (simulate_policy(case, name).simulated.step_time_s for name in ("static", "balanced"))
    assert found["balanced"] == pytest.approx(balanced_s)
    assert found["static"] != static_s
    assert found["static"] == simulate_policy(permuted, "static").simulated.step_time_s


def test_recording_operations_does_not_change_the_step() -> None:
    case = some_case()
    outcome = simulate_policy(case, "static")
    for micro_step in range(outcome.plan.num_micro_steps):
        shown = operations(case, outcome, micro_step)
        assert len(shown.rank_N) == len(shown.kind_N) > 0
        assert set(shown.rank_N.tolist()) == {0, 1, 2, 3}


def test_the_trace_hash_depends_on_the_routing_only() -> None:
    trace = some_trace()
    own = trace_hash(trace)
    assert trace_hash(some_trace()) == own
    ids = trace.expert_ids.copy()
    ids[5, 1] = ids[5, 1, ::-1] if ids[5, 1, 0] != ids[5, 1, 1] else ids[5, 1]
    ids[5, 1, 0] = (ids[5, 1, 0] + 1) % 8
    assert trace_hash(replace(trace, expert_ids=ids)) != own
    assert trace_hash(replace(trace, steps=trace.steps + 1)) != own
    assert trace_hash(trace.select(np.arange(6))) != own
    starts = trace.sequence_starts.copy()
    starts[1] -= 1
    assert trace_hash(replace(trace, sequence_starts=starts)) != own
    assert trace_hash(replace(trace, layer_indices=trace.layer_indices + 1)) != own
    # What planning does not look at.
    assert trace_hash(replace(trace, model="another")) == own
    assert trace_hash(replace(trace, prompt_lengths=np.ones_like(trace.prompt_lengths))) == own


ODD: tuple[dict[str, Any], ...] = (
    {"cluster": ClusterSpec(1, 1, 2)},
    {"cluster": ClusterSpec(2, 1, 0)},
    {"cluster": ClusterSpec(8, 4, 1)},
    {"cluster": ClusterSpec(4, 2, 1, host_bytes_per_s=0.0)},
    {"cluster": ClusterSpec(4, 2, 1, node_bytes_per_s=0.0)},
    {"cluster": ClusterSpec(4, 1, 1, network_bytes_per_s=0.0, node_bytes_per_s=0.0)},
    {"cluster": ClusterSpec(4, 4, 1, dispatch_forwards=False), "settings": StepSettings(groups=3, meet="layer")},
    {"mini_batches": 2, "settings": StepSettings(groups=2, ring_layers=1)},
)


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_balancer_runs_in_odd_settings(name: str) -> None:
    """One rank, no slots, one expert a rank, links that are missing, groups; and routes that are missing."""
    trace = some_trace()
    ids = trace.expert_ids.copy()
    ids[trace.sequence_starts[5], 1] = trace.no_route
    # RoutePack's search takes its time.
    for changes in ODD[:1] if name == "routepack" else ODD:
        for case in (some_case(**changes), some_case(replace(trace, expert_ids=ids), **changes)):
            outcome = simulate_policy(case, name)
            step = outcome.simulated
            assert 0 < step.step_time_s < 1
            assert sum(step.parts_s.values()) == pytest.approx(step.step_time_s)
            assert outcome.memory["replica pool"] >= 0
            assert 0 <= outcome.cross_node_fraction <= 1
            if case.cluster.ranks == 1:
                assert outcome.plan.num_replicas == 0
                assert step.parts_s["imbalance"] == pytest.approx(0.0, abs=1e-12)


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
