"""Comparison of balancers on one step: what each is given, and that each runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from helpers.comparison_cases import MODEL, some_case, some_trace
from trimtab import ClusterSpec, InputError, Placement, RoutingTrace, StepPlan
from trimtab.array_type import Array
from trimtab.cluster import StepCosts
from trimtab.planner import SequenceCounts, pack_by_length
from trimtab.planner.schedule.time_packing import pack_by_time
from trimtab.policies import POLICIES, Eplb, Policy, Traits, View
from trimtab.policies.policy import with_choices
from trimtab.simulator import comparison
from trimtab.simulator.comparison import permuted_steps, simulate_policy
from trimtab.simulator.comparison_case import step_of, trace_hash
from trimtab.simulator.step import StepSettings
from trimtab.trace.numbering import permute_experts, random_orders


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


@dataclass(frozen=True)
class Spy:
    """Plans as `static`, and keeps what it was shown."""

    traits: ClassVar[Traits] = Traits(known_at="past", transfers_start="never", copies="none")
    seen: ClassVar[list[View]] = []

    def plan(self, view: View) -> StepPlan:
        self.seen.append(view)
        return POLICIES["static"].plan(view)


class Mover(Spy):
    """Turns the homes of some layers round by one rank; of all layers unless `layers` says which, by step."""

    traits = Traits(known_at="past", transfers_start="never", copies="none", relocates=True)
    seen: ClassVar[list[View]] = []
    layers: ClassVar[list[tuple[int, ...]]] = []

    def plan(self, view: View) -> StepPlan:
        plan = super().plan(view)
        moving = list(self.layers.pop(0) if self.layers else range(plan.num_layers))
        home_LE = plan.home.copy()
        home_LE[moving] = (home_LE[moving] + 1) % 4
        return replace(plan, home=home_LE)


@pytest.fixture
def spies(monkeypatch: pytest.MonkeyPatch) -> None:
    Spy.seen.clear()
    Mover.seen.clear()
    monkeypatch.setitem(POLICIES, "spy", Spy())
    monkeypatch.setitem(POLICIES, "mover", Mover())


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


@pytest.mark.parametrize("name", [*POLICIES])
def test_several_steps_are_the_mean_of_single_ones(name: str) -> None:
    """Each step alone, after those before it."""
    case = some_case(some_trace(steps=(1, 2, 2, 3, 3, 4, 4)), measured=3)
    seen = simulate_policy(case, name)
    parts, policy = case.steps, seen.policy
    alone = []
    for last in (1, 2, 3):
        single = replace(case, sequences=parts[last], earlier=parts[:last], measured=1)
        alone.append(simulate_policy(single, name, Once(policy)))
    assert seen.step_times_s == pytest.approx([outcome.simulated.step_time_s for outcome in alone])
    assert seen.simulated.step_time_s == pytest.approx(np.mean(seen.step_times_s))
    for part, seconds in seen.simulated.parts_s.items():
        assert seconds == pytest.approx(np.mean([outcome.simulated.parts_s[part] for outcome in alone]), abs=1e-15)
    assert seen.migration_bytes == pytest.approx(np.mean([outcome.migration_bytes for outcome in alone]), abs=1)
    assert seen.replicas_per_instance == pytest.approx(np.mean([outcome.replicas_per_instance for outcome in alone]))
    assert seen.peak_bytes == max(outcome.peak_bytes for outcome in alone)
    assert np.array_equal(seen.plan.home, alone[-1].plan.home)


@dataclass(frozen=True)
class Once:
    """A policy with the constants that it has."""

    policy: Policy

    @property
    def traits(self) -> Traits:
        return self.policy.traits

    def plan(self, view: View) -> StepPlan:
        return self.policy.plan(view)


@pytest.mark.usefixtures("spies")
def test_the_first_move_of_a_layer_is_paid_once_and_later_ones_in_their_steps() -> None:
    case = some_case(some_trace(steps=(1, 2, 2, 3, 3, 4, 4)), measured=4)
    seen = simulate_policy(replace(case, measured=1), "mover")
    moving_s = seen.simulated.parts_s["migration"]
    assert moving_s > 0
    # Also a first move in a step that is not measured.
    assert seen.first_moves_s == pytest.approx(moving_s)
    outcome = simulate_policy(case, "mover")
    # All homes turn in each step, which takes the same time in each.
    assert outcome.simulated.parts_s["migration"] == pytest.approx(3 * moving_s / 4)
    assert outcome.first_moves_s == pytest.approx(moving_s)
    # One layer moves in each of the first two steps, and both in the last two. Before, a few sequences are planned.
    Mover.layers = [(), (0,), (1,), (0, 1), (0, 1)]
    staggered = simulate_policy(case, "mover")
    assert staggered.first_moves_s == pytest.approx(moving_s)
    assert staggered.simulated.parts_s["migration"] == pytest.approx(2 * moving_s / 4)
    stays = simulate_policy(case, "spy")
    assert stays.simulated.parts_s["migration"] == stays.first_moves_s == 0


@pytest.mark.parametrize("name", ["eplb", "relibra", "foremoe", "llep"])
def test_a_balancer_has_its_best_constants_and_number_of_slots(name: str) -> None:
    case = some_case(some_trace(steps=(1, 2, 2, 3, 3, 4, 4), longer=1500), measured=3, token_budget=2000)
    chosen = simulate_policy(case.with_slots(1, 2), name)
    balancer: Any = POLICIES[name]
    tried = [replace(balancer, **choice) for choice in balancer.choices]
    assert [type(policy) for policy in tried] == [type(chosen.policy)] * len(tried)
    seconds = {
        (policy, slots): simulate_policy(case.with_slots(slots), name, Once(policy)).simulated.step_time_s
        for policy in tried for slots in (1, 2)
    }  # fmt: skip
    assert len(set(seconds.values())) > 1
    assert chosen.simulated.step_time_s == min(seconds.values())
    assert seconds[chosen.policy, chosen.plan.slots_per_rank] == min(seconds.values())


def test_choices_are_made_with_estimates_and_the_best_is_counted() -> None:
    trace = some_trace(steps=(1, 2, 2, 3, 3), longer=1500)
    case = some_case(trace, measured=2, token_budget=2000)
    counted = replace(case, traces=tuple(trace.select(np.flatnonzero(trace.steps == step)) for step in (2, 3)))
    chosen, policy = simulate_policy(counted.with_slots(1, 2), "eplb"), simulate_policy(case.with_slots(1, 2), "eplb")
    assert (chosen.policy, chosen.plan.slots_per_rank, chosen.slots_s) == (
        policy.policy, policy.plan.slots_per_rank, policy.slots_s,
    )  # fmt: skip
    alone = simulate_policy(counted.with_slots(chosen.plan.slots_per_rank), "eplb", Once(chosen.policy))
    assert chosen.simulated.step_time_s == alone.simulated.step_time_s != policy.simulated.step_time_s


def test_a_case_has_the_steps_that_it_measures() -> None:
    with pytest.raises(InputError, match="5 steps to simulate: the case has 3"):
        some_case(measured=5)


def test_all_balancers_but_static_get_sequences_packed_by_time() -> None:
    case = some_case(some_trace(seed=1, steps=(0,) * 7, longer=200), token_budget=900)
    plans = {name: simulate_policy(case, name).plan for name in ("static", "scheduled", "eplb_oracle", "balanced")}
    by_length = pack_by_length(case.sequences.lengths, num_ranks=4, token_budget=900)
    assert np.array_equal(plans["static"].rank, by_length.rank)
    costs = StepCosts.of(case.cluster, MODEL, moe_layers=2)
    by_time = pack_by_time(by_length, case.sequences.lengths, 2, case.cluster, costs, 900)
    assert not np.array_equal(by_time.rank, by_length.rank)
    for name in ("scheduled", "eplb_oracle", "balanced"):
        assert np.array_equal(plans[name].rank, by_time.rank)
    assert plans["scheduled"].num_replicas == 0
    assert np.array_equal(plans["scheduled"].home, plans["static"].home)


def test_planning_time_is_in_microseconds_of_an_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Slow(Spy):
        def plan(self, view: View) -> StepPlan:
            clock[0] += 0.05
            return super().plan(view)

    monkeypatch.setattr(comparison, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setitem(POLICIES, "slow", Slow())
    outcome = simulate_policy(some_case(token_budget=40), "slow")
    instances = outcome.plan.num_micro_steps * outcome.plan.num_layers
    assert instances > 1
    assert outcome.plan_us * 1e-6 * instances == pytest.approx(0.05)


@pytest.mark.usefixtures("spies")
def test_on_equal_terms_all_policies_get_the_same_input() -> None:
    case = some_case(equal_terms=True)
    simulate_policy(case, "mover")
    *_, now = Mover.seen
    assert now.equal_terms
    assert np.array_equal(now.placement.home, Placement.contiguous(2, 8, 4).home)
    plans = [simulate_policy(case, name).plan for name in ("static", "trimtab", "llep", "relibra", "eplb_oracle")]
    for plan in plans:
        for name in ("home", "micro_step", "rank"):
            assert np.array_equal(getattr(plan, name), getattr(plans[0], name))
        assert plan.slots_per_rank <= case.cluster.slots_per_rank
    own = simulate_policy(replace(case, equal_terms=False), "eplb_oracle").plan
    assert not np.array_equal(own.home, plans[0].home)


@pytest.mark.parametrize("name", ["eplb", "trimtab", "static", "fastermoe"])
def test_of_several_numbers_of_slots_a_balancer_has_the_best(name: str) -> None:
    case = some_case()
    numbers = (1, 2, 4)
    alone = {number: simulate_policy(case.with_slots(number), name) for number in numbers}
    found = simulate_policy(case.with_slots(*numbers), name)
    if name in ("static", "fastermoe"):
        # They have none, or as many as they need.
        assert not found.slots_s
        assert found.simulated.step_time_s == alone[1].simulated.step_time_s
        return
    assert tuple(found.slots_s) == numbers
    chosen = found.plan.slots_per_rank
    assert found.simulated.step_time_s == alone[chosen].simulated.step_time_s
    if name == "eplb":
        assert found.slots_s == {number: each.simulated.step_time_s for number, each in alone.items()}
        assert found.simulated.step_time_s == min(found.slots_s.values())
    # On a device without room for that, fewer.
    most = sum(alone[1].memory.values())
    small = replace(case, cluster=replace(case.cluster, device_bytes=float(max(most, 1e6))))
    assert simulate_policy(small.with_slots(*numbers), name).plan.slots_per_rank <= chosen


def test_sequences_are_assigned_to_mini_batches_in_order() -> None:
    case = some_case(some_trace(steps=(0,) * 7), mini_batches=3)
    outcome = simulate_policy(case, "static")
    assert outcome.plan.mini_batch_of_micro_step[outcome.plan.micro_step].tolist() == [0, 0, 0, 1, 1, 2, 2]
    # No more than there are sequences.
    most = simulate_policy(replace(case, mini_batches=100), "static").plan
    assert most.mini_batch_of_micro_step[most.micro_step].tolist() == list(range(7))
    assert most.num_micro_steps == 7


def test_permuted_experts_change_static_and_not_the_ideal() -> None:
    case = some_case(some_trace(longer=300), token_budget=400)
    permuted = case.with_permuted_experts(3)
    for mine, other in zip((case.sequences, *case.earlier), (permuted.sequences, *permuted.earlier), strict=True):
        order_LE = random_orders(mine.num_layers, mine.num_experts, 3)
        assert np.array_equal(other.counts_SLE, permute_experts(mine.counts_SLE, order_LE))
        assert np.array_equal(mine.lengths, other.lengths)
    found = permuted_steps(case, {name: simulate_policy(case, name) for name in ("static", "balanced")}, 3)
    assert found["balanced"].step_time_s == pytest.approx(simulate_policy(case, "balanced").simulated.step_time_s)
    assert found["static"].step_time_s == simulate_policy(permuted, "static").simulated.step_time_s
    assert found["static"].step_time_s != simulate_policy(case, "static").simulated.step_time_s


def test_the_trace_hash_depends_on_the_routing_only() -> None:
    trace = some_trace()
    own = trace_hash(trace)
    assert trace_hash(some_trace()) == own
    ids, starts = trace.expert_ids.copy(), trace.sequence_starts.copy()
    ids[5, 1, 0] = (ids[5, 1, 0] + 1) % 8
    starts[1] -= 1
    others: tuple[dict[str, Any], ...] = (
        {"expert_ids": ids},
        {"sequence_starts": starts},
        {"steps": trace.steps + 1},
        {"layer_indices": trace.layer_indices + 1},
    )
    assert not any(trace_hash(replace(trace, **other)) == own for other in others)
    assert trace_hash(trace.select(np.arange(6))) != own
    # What planning does not look at.
    assert trace_hash(replace(trace, model="another")) == own
    assert trace_hash(replace(trace, prompt_lengths=np.ones_like(trace.prompt_lengths))) == own


def test_the_only_row_of_a_step_is_computed_on_another_node() -> None:
    trace = RoutingTrace.from_sequences([np.full((1, 1, 1), 7)], num_experts=8)
    case = some_case(trace, model=replace(MODEL, top_k=1, moe_layers=1))
    assert simulate_policy(case, "static").cross_node_fraction == 1


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
            assert outcome.load.pool_R.max() > 0 or not outcome.plan.num_replicas
            assert 0 <= outcome.cross_node_fraction <= 1
            if case.cluster.ranks == 1:
                assert outcome.plan.num_replicas == 0
                assert step.parts_s["imbalance"] == pytest.approx(0.0, abs=1e-12)


def test_constants_that_fit_are_better_than_faster_ones_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with one number of slots."""
    case = some_case(some_trace(steps=(1, 2, 2, 3, 3, 4, 4), longer=1500), measured=3, token_budget=2000)
    fastest: Any = simulate_policy(case, "feplb").policy
    monkeypatch.setattr(comparison, "fits", lambda case, outcome: outcome.policy != fastest)
    assert simulate_policy(case, "feplb").policy != fastest
    monkeypatch.setattr(comparison, "fits", lambda case, outcome: False)
    assert simulate_policy(case, "feplb").policy == fastest


def test_a_variant_with_constants_of_its_own_keeps_them() -> None:
    variant = Eplb(interval=2, window=3)
    assert simulate_policy(some_case(), "eplb", variant).policy == variant
    assert with_choices(Eplb()) != [Eplb()]
