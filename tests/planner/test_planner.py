"""The planner's invariants over many random loads, and plans held against a plain recount."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import planner_reference as reference
from helpers.random_plans import random_plan, random_schedule, random_trace
from trimtab import ClusterSpec, InputError, Placement, Schedule, StepPlan, Workload
from trimtab.array_type import Array
from trimtab.planner import PlanSettings, plan_step
from trimtab.planner.plan.workload import max_over_mean


def contiguous_plan(workload: Workload, schedule: Schedule, cluster: ClusterSpec) -> StepPlan:
    placement = Placement.contiguous(workload.num_layers, workload.num_experts, workload.num_ranks)
    return plan_step(workload, schedule, placement, cluster)


def recount(plan: StepPlan, workload: Workload) -> Array:
    """Rank loads `[M, L, R]` by following every quota, one at a time; unknown rows where the reference expects them."""
    loads = np.zeros((workload.num_micro_steps, workload.num_layers, workload.num_ranks), np.int64)
    for (m, layer, expert), rows in np.ndenumerate(reference.expected_experts(workload)):
        loads[m, layer, plan.home[layer, expert]] += rows
    for m, layer in itertools.product(range(workload.num_micro_steps), range(workload.num_layers)):
        left_RE = workload.token_counts_MLRE[m, layer].astype(np.int64)
        for p in plan.replicas_of(m, layer):
            for q in range(plan.quota_starts[p], plan.quota_starts[p + 1]):
                left_RE[plan.quota_sources[q], plan.replica_experts[p]] -= plan.quota_tokens[q]
                loads[m, layer, plan.replica_ranks[p]] += plan.quota_tokens[q]
        for expert, tokens in enumerate(left_RE.sum(axis=0)):
            loads[m, layer, plan.home[layer, expert]] += tokens
    return loads


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.random.Generator, Workload, object, int]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    experts = ranks * draw(st.integers(1, 6))
    trace = random_trace(
        rng,
        num_sequences=draw(st.integers(1, 12)),
        max_length=draw(st.sampled_from([1, 20, 200])),
        num_layers=draw(st.integers(1, 3)),
        num_experts=experts,
        top_k=draw(st.integers(1, min(4, experts))),
        unknown=draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 0.9, 1.0])),
    )
    schedule = random_schedule(rng, trace.num_sequences, num_ranks=ranks, num_micro_steps=draw(st.integers(1, 3)))
    workload = Workload.from_trace(trace, schedule)
    return rng, workload, schedule, draw(st.integers(0, 3))


@settings(max_examples=150, deadline=None)
@given(steps(), st.integers(1, 64), st.sampled_from([1.0, 1.02, 1.2]))
def test_plans_keep_every_invariant_and_never_hurt(step, smallest_share, threshold) -> None:  # type: ignore[no-untyped-def]
    _, workload, schedule, slots = step
    placement = Placement.contiguous(workload.num_layers, workload.num_experts, workload.num_ranks)
    per_node = max(d for d in (1, 2, 4) if workload.num_ranks % d == 0)
    cluster = ClusterSpec(workload.num_ranks, per_node, slots)
    plan = plan_step(workload, schedule, placement, cluster, PlanSettings(threshold, smallest_share))
    plan.check(workload)
    loads = plan.rank_loads(workload)
    assert np.array_equal(loads, recount(plan, workload))
    assert np.all(loads.max(axis=-1) <= workload.home_loads(plan.home).max(axis=-1))
    shares = np.add.reduceat(plan.quota_tokens, plan.quota_starts[:-1]) if plan.num_replicas else np.empty(0)
    assert np.all(shares >= smallest_share)


@settings(max_examples=60, deadline=None)
@given(steps())
def test_random_plans_are_valid_and_counted_right(step) -> None:  # type: ignore[no-untyped-def]
    rng, workload, schedule, slots = step
    plan = random_plan(rng, workload, schedule, slots=slots)
    plan.check(workload)
    assert np.array_equal(plan.rank_loads(workload), recount(plan, workload))


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_broken_plans_are_refused(step, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    rng, workload, schedule, slots = step
    plan = random_plan(rng, workload, schedule, slots=slots)
    breakers: dict[str, dict[str, object]] = {
        "more micro-steps than the workload has": {"mixed_ML": np.append(plan.mixed_ML, plan.mixed_ML[:1], axis=0)},
        "another instance with unknown routes": {"mixed_ML": ~plan.mixed_ML},
        "a home that doesn't exist": {"home": plan.home + np.int16(plan.num_ranks)},
    }
    if plan.num_replicas:
        first_instance = np.searchsorted(plan.replica_starts, 0, side="right") - 1
        home = plan.home[first_instance % plan.num_layers, plan.replica_experts[0]]
        ranks = plan.replica_ranks.copy()
        ranks[0] = home
        breakers["a replica at home"] = {"replica_ranks": ranks}
        breakers["no slots"] = {"slots_per_rank": 0}
        breakers["a replica nobody starts"] = {"replica_experts": plan.replica_experts[:-1]}
    if len(plan.quota_tokens):
        tokens = plan.quota_tokens.copy()
        tokens[0] = workload.token_counts_MLRE.max() + 1
        breakers["too many tokens"] = {"quota_tokens": tokens}
        breakers["an empty quota"] = {"quota_tokens": np.zeros_like(tokens)}
    name = data.draw(st.sampled_from(sorted(breakers)))
    values = {field: getattr(plan, field) for field in plan.__dataclass_fields__} | breakers[name]
    with pytest.raises(InputError, match="invalid plan"):
        StepPlan(**values).check(workload)


@settings(max_examples=30, deadline=None)
@given(steps())
def test_plans_survive_saving_and_planning_repeats(step) -> None:  # type: ignore[no-untyped-def]
    _, workload, schedule, slots = step
    cluster = ClusterSpec(workload.num_ranks, workload.num_ranks, slots)
    plan = contiguous_plan(workload, schedule, cluster)
    assert StepPlan.from_bytes(plan.to_bytes()).hash == plan.hash
    assert contiguous_plan(workload, schedule, cluster).hash == plan.hash


def skewed_workload(ranks: int, experts: int, seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    popularity_E = rng.permutation(np.arange(1, experts + 1) ** -0.8)
    counts = rng.multinomial(4096 * ranks // ranks * 8, popularity_E / popularity_E.sum(), size=(4, 2, ranks))
    return Workload.known(counts.astype(np.int32))


@pytest.mark.parametrize(
    ("ranks", "experts", "limit"), [(2, 32, 1.02), (8, 128, 1.02), (16, 128, 1.03), (32, 128, 1.06)]
)
def test_two_slots_take_most_of_the_imbalance(ranks: int, experts: int, limit: float) -> None:
    workload = skewed_workload(ranks, experts, seed=ranks)
    schedule = random_schedule(np.random.default_rng(0), 0, num_ranks=ranks, num_micro_steps=4)
    plan = contiguous_plan(workload, schedule, ClusterSpec(ranks, min(ranks, 8), 2))
    static = max_over_mean(workload.home_loads(plan.home)).mean()
    assert static > 1.1
    assert max_over_mean(plan.rank_loads(workload)).mean() <= limit


def test_an_even_load_gets_no_replicas() -> None:
    workload = Workload.known(np.full((2, 3, 4, 16), 100, np.int32))
    schedule = random_schedule(np.random.default_rng(0), 0, num_ranks=4, num_micro_steps=2)
    assert contiguous_plan(workload, schedule, ClusterSpec(4, 4, 2)).num_replicas == 0


def test_the_split_keeps_tokens_near() -> None:
    """A replica first takes its own rank's tokens, and the home keeps its own."""
    counts = np.zeros((1, 1, 4, 4), np.int32)
    counts[0, 0, :, 0] = 1000
    workload = Workload.known(counts)
    schedule = random_schedule(np.random.default_rng(0), 0, num_ranks=4, num_micro_steps=1)
    plan = contiguous_plan(workload, schedule, ClusterSpec(4, 4, 1))
    assert sorted(plan.replica_ranks) == [1, 2, 3]
    for p in plan.replicas_of(0, 0):
        quotas = slice(plan.quota_starts[p], plan.quota_starts[p + 1])
        assert plan.quota_sources[quotas].tolist() == [plan.replica_ranks[p]]
        assert 995 <= plan.quota_tokens[quotas].sum() <= 1000


def test_replicas_stay_in_the_node_while_it_has_room() -> None:
    """Rank 0 is hot, rank 1 of its node idle, the other node busy: the copy goes to rank 1."""
    counts = np.zeros((1, 1, 4, 8), np.int32)
    counts[0, 0, :, [0, 4, 6]] = np.array([[500], [240], [260]])
    workload = Workload.known(counts)
    schedule = random_schedule(np.random.default_rng(0), 0, num_ranks=4, num_micro_steps=1)
    plan = contiguous_plan(workload, schedule, ClusterSpec(4, 2, 1))
    assert plan.replica_ranks.tolist() == [1]


def test_ranks_must_divide_experts() -> None:
    with pytest.raises(InputError, match="3 ranks don't divide 32 experts; use one of 1, 2, 4, 8, 16, 32"):
        Placement.contiguous(1, 32, 3)


def test_a_file_that_is_no_plan_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "plan.npz").write_bytes(b"nonsense")
    with pytest.raises(InputError, match=r"plan\.npz: not a step plan"):
        StepPlan.load(tmp_path / "plan.npz")
    with pytest.raises(InputError, match="no such file"):
        StepPlan.load(tmp_path / "absent.npz")
