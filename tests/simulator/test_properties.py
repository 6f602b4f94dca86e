"""Properties of every simulated step, for any plan, costs and traits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.simulated_steps import GRADIENTS, MOVES, ROWS, SECONDS, WEIGHTS, Case, cases, free_costs
from trimtab import ClusterSpec, Placement, Schedule, StepPlan, Workload
from trimtab.array_type import Array
from trimtab.planner.plan.pass_times import PARTS
from trimtab.policies import Traits
from trimtab.policies.planning_time import NO_PLANNING, Exchange, TimeAtSize
from trimtab.simulator.recorded_operations import KINDS, LANES, WAITING
from trimtab.simulator.step import StepSettings

LITTLE = 1 + 1e-12
TRANSFERS = (*WEIGHTS, *GRADIENTS, *MOVES)


def alone(case: Case) -> Case:
    """With links on which all-to-alls don't get in the way of transfers.

    Where they do, finishing something sooner can make a step longer: an all-to-all that starts sooner may then meet a
    transfer that would have been through before.
    """
    return case.but(near_spare=1.0, far_spare=1.0)


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_parts_add_up_and_every_rank_accounts_for_its_time(case: Case, data: st.DataObject) -> None:
    show = data.draw(st.integers(0, case.plan.num_micro_steps - 1))
    step = case.run(show)
    assert list(step.parts_s) == list(PARTS)
    assert sum(step.parts_s.values()) == pytest.approx(step.step_time_s, rel=1e-9)
    assert all(seconds >= 0 for name, seconds in step.parts_s.items() if name != "imbalance")
    shown, tiny = step.operations, 1e-9 * step.step_time_s
    assert np.all(shown.spans_N2[:, 0] >= -tiny)
    assert np.all(shown.kind_N < len(KINDS))
    assert np.all(shown.lane_N < len(LANES))
    assert np.all((shown.layer_N >= -1) & (shown.layer_N < case.plan.num_layers))
    busy_D = busy_seconds(case, show)
    for d in range(case.plan.num_ranks * case.settings.groups):
        mine = (shown.rank_N == d) & (shown.lane_N == 0)
        spans_N2 = shown.spans_N2[mine][np.argsort(shown.spans_N2[mine, 0], kind="stable")]
        assert np.all(spans_N2[1:, 0] >= spans_N2[:-1, 1] - tiny), "a rank does two things at once"
        assert spans_N2.max(initial=0) <= step.step_time_s + tiny
        lasting = np.diff(shown.spans_N2[mine & (shown.kind_N != WAITING)], axis=1).sum()
        assert lasting == pytest.approx(busy_D[d], rel=1e-9, abs=tiny), "the lane doesn't show all that it does"


def busy_seconds(case: Case, show: int) -> Array:
    """Seconds `[D]` that ranks compute and exchange in the update of the round that has micro-step `show`."""
    plan, costs, work = case.plan, case.costs, case.run().work
    forwards = 2 if case.settings.checkpointing else 1
    batch = plan.schedule.micro_steps_of(int(plan.mini_batch_of_micro_step[show]))
    first = batch.index(show) // case.settings.groups * case.settings.groups
    busy_D = np.zeros(plan.num_ranks * case.settings.groups)
    for g, m in enumerate(batch[first : first + case.settings.groups]):
        for r in range(plan.num_ranks):
            lengths = case.lengths[(plan.micro_step == m) & (plan.rank == r)].astype(float)
            tokens, squares, near = lengths.sum(), (lengths**2).sum(), costs.pairs_within_reach(lengths).sum()
            inside = costs.layer_s + costs.token_s * tokens + costs.square_s * squares + costs.reach_s * near
            outside = costs.outer_s + costs.outer_token_s * tokens + costs.outer_square_s * squares
            outside += costs.outer_reach_s * near
            dense = plan.num_layers * inside + outside
            experts = work.experts_MLR[m, :, r].sum() + work.moved_MLR[m, :, r].sum()
            calls = costs.dispatch_s + np.maximum(work.near_MLR[m, :, r], work.far_MLR[m, :, r])
            busy_D[g * plan.num_ranks + r] = (
                (forwards + costs.dense_backward) * dense
                + (forwards + costs.expert_backward) * experts
                + 2 * (forwards + 1) * calls.sum()
            )
    return busy_D


@settings(max_examples=60, deadline=None)
@given(cases())
def test_time_is_proportional_to_costs_and_deterministic(case: Case) -> None:
    once, again = case.run(0), case.run(0)
    assert once.parts_s == again.parts_s
    assert all(
        np.array_equal(*pair)
        for pair in zip(vars(once.operations).values(), vars(again.operations).values(), strict=True)
    )
    planning = case.traits.planning
    twice = case.but(
        **{name: 2 * getattr(case.costs, name) for name in SECONDS},
        planning=replace(
            planning,
            sizes=tuple(TimeAtSize(size.ranks, *(2 * us for us in size[1:])) for size in planning.sizes),
            route_us=2 * planning.route_us,
            exchange=Exchange(*(2 * us for us in planning.exchange)),
        ),
    ).run()
    assert twice.step_time_s == 2 * once.step_time_s
    assert twice.parts_s == {name: 2 * seconds for name, seconds in once.parts_s.items()}


@settings(max_examples=60, deadline=None)
@given(cases())
def test_with_infinitely_fast_links_no_rank_waits_for_transfers(case: Case) -> None:
    free = case.free(*TRANSFERS).but(planning=NO_PLANNING)
    if case.traits.hops == 2 or case.traits.copies == "layer slots":
        # Rows of a second hop wait for the first. Gradients of kept copies leave after their rank's combine, which may
        # be later than the home's.
        free = free.free(*ROWS)
    parts = free.run().parts_s
    assert (parts["transfers"], parts["planning"], parts["migration"]) == (0.0, 0.0, 0.0)


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_faster_links_and_more_room_never_make_a_step_slower(case: Case, data: st.DataObject) -> None:
    slow = alone(case)
    names = data.draw(st.sets(st.sampled_from([*TRANSFERS, *ROWS, "dispatch_s"]), min_size=1))
    # Not 0, which stands for no link.
    factor = data.draw(st.sampled_from([1e-6, 0.5, 0.9]))
    fast = slow.but(**{name: factor * getattr(slow.costs, name) for name in names})
    assert fast.run().step_time_s <= slow.run().step_time_s * LITTLE
    deeper = slow.but(ring_layers=slow.settings.ring_layers + 1)
    assert deeper.run().step_time_s <= slow.run().step_time_s * LITTLE
    if slow.traits.copies == "shared slots":
        assert slow.but(copies="unbounded").run().step_time_s <= slow.run().step_time_s * LITTLE


@settings(max_examples=60, deadline=None)
@given(cases())
def test_synchronising_groups_more_often_is_not_faster(case: Case) -> None:
    often, seldom = (alone(case).but(meet=meet).run().step_time_s for meet in ("layer", "step"))
    assert seldom <= often * LITTLE
    # One group whose ranks have the same dense parts and exchange nothing has nobody else to wait for.
    even = (
        alone(case)
        .free("token_s", "square_s", "outer_token_s", "outer_square_s", "reach_s", "outer_reach_s", *ROWS)
        .but(groups=1, hops=1)
    )
    often, seldom = (even.but(meet=meet).run().step_time_s for meet in ("layer", "step"))
    assert often == pytest.approx(seldom, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_no_plan_beats_even_rows(case: Case) -> None:
    """Where rows are all that experts take time for, and come at no cost.

    Else one can: a copy more has its own fixed cost and its own last tile, and rows that stay on their rank need no
    all-to-all, while the ideal spreads all rows over all ranks.
    """
    counts_MLRE = case.workload.token_counts_MLRE
    # Rows that come out even for every expert.
    even = replace(case, workload=Workload.known(counts_MLRE * counts_MLRE.shape[3]))
    even = replace(even, plan=replace(case.plan, quota_tokens=case.plan.quota_tokens * counts_MLRE.shape[3]))
    even = alone(even).free("copy_s", "weights_s", *ROWS).but(tile_rows=1)
    ideal = even.but(ideal=True, copies="none", known_at="past", hops=1)
    assert ideal.run().step_time_s <= even.run().step_time_s * LITTLE


@settings(max_examples=40, deadline=None)
@given(cases(max_groups=1))
def test_as_many_groups_as_micro_steps_take_as_long_as_the_longest(case: Case) -> None:
    assume(not case.plan.mini_batch_of_micro_step.any())
    micro_steps = case.plan.num_micro_steps
    case = case.but(reduce_s=0.0, meet="step", copies="none", known_at="past")
    # Each by itself: the others' tokens and rows taken away. Estimates would depend on the whole step.
    case = replace(case, workload=Workload.known(case.workload.token_counts_MLRE))
    longest = 0.0
    for m in range(micro_steps):
        counts_MLRE = np.zeros_like(case.workload.token_counts_MLRE)
        counts_MLRE[m] = case.workload.token_counts_MLRE[m]
        lengths = np.where(case.plan.micro_step == m, case.lengths, 0)
        mine = case.plan.micro_step == m
        one = replace(
            case.plan, micro_step=np.zeros(mine.sum(), np.int32), rank=case.plan.rank[mine],
            mini_batch_of_micro_step=np.zeros(1, np.int32), mixed_ML=case.plan.mixed_ML[m : m + 1],
        ).without_replicas()  # fmt: skip
        one = replace(one, replica_starts=np.zeros(case.plan.num_layers + 1, np.int64))
        workload = Workload.known(counts_MLRE[m : m + 1])
        alone_m = replace(case, plan=one, workload=workload, lengths=lengths[mine], before=None)
        longest = max(longest, alone_m.run().step_time_s)
    together = replace(case, plan=case.plan.without_replicas(), before=None).but(groups=micro_steps).run()
    assert together.step_time_s == pytest.approx(longest, rel=1e-9)


def test_with_all_to_alls_a_faster_link_can_delay_a_step() -> None:
    """Dense parts take half as long, and the step more: a dispatch comes upon a transfer that used to be through."""
    counts_MLRE = np.zeros((1, 1, 3, 3), np.int32)
    counts_MLRE[0, 0, 1, 0], counts_MLRE[0, 0, 2, 0] = 5, 3
    schedule = Schedule(np.zeros(3, np.int32), np.arange(3, dtype=np.int32), np.zeros(1, np.int32), 3)
    workload, cluster = Workload.known(counts_MLRE), ClusterSpec(3, 3, 1)
    plan = StepPlan.from_instances(
        schedule, Placement.contiguous(1, 3, 3), [np.array([[0, 1]])], [np.array([[0, 5, 0]])],
        mixed_ML=workload.mixed_ML, cluster=cluster,
    )  # fmt: skip
    costs = free_costs(layer_s=10.0, near_weights_s=10.0, near_spare=0.0, row_s=1.0, near_row_s=1.0)
    traits = Traits(known_at="past", transfers_start="step")
    plan = replace(plan, replica_paths=np.zeros(1, np.uint8))
    case = Case(plan, workload, np.ones(3, np.int64), costs, cluster, traits, StepSettings())
    forward_only = case.but(dense_backward=1e-12, expert_backward=1e-12)
    # Weights are through as dispatch begins, at 10; rank 1 has its rows at once and needs 5 s for them, rank 0 gets its
    # three until 13, and computes until 16. Backward has two all-to-alls more.
    assert forward_only.run().step_time_s == pytest.approx(2 * (10 + 3 + 3 + 3) + 6)
    # Dispatch takes the link of rank 0 from 5 to 8, so the weights come at 13, and rank 1 computes until 18.
    assert forward_only.but(layer_s=5.0).run().step_time_s == pytest.approx(2 * (5 + 8 + 5 + 3) + 6)
