"""Steps small enough to work out on paper: two ranks, two layers, one micro-step, one replica.

Each rank has four tokens, a token's dense parts take 0.25 s and a row 0.5 s. In layer 0 everybody's rows stay at home.
In layer 1 all want expert 0 of rank 0. Two of rank 1's four go to a replica there, two to rank 0, through a link on
which a row takes 0.5 s, and on which an all-to-all leaves half the rate. Without waiting for weights a forward takes

    1 (dense) + 2 (experts) + 1 (dense) + 1 (dispatch) + 3 (experts of rank 0; rank 1 needs 1) + 1 (combine) = 9 s,

a backward 1 + 6 + 1 + 2 + 4 + 2 = 16 s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.simulated_steps import Case, free_costs, planning_time
from trimtab import ClusterSpec, Placement, Schedule, StepPlan, Workload
from trimtab.cluster import StepCosts
from trimtab.planner.plan.prediction import predict
from trimtab.policies import Traits
from trimtab.policies.planning_time import Exchange
from trimtab.simulator.step import StepSettings
from trimtab.timeline import PARTS

MICROSECOND = 1e-6


def small_case(*, both_layers: bool = False, **traits: Any) -> Case:
    """The step above. With `both_layers` also layer 0 has a replica of expert 0 on rank 1, for one of its rows."""
    counts_LRE = [[[4, 0], [1, 3]] if both_layers else [[4, 0], [0, 4]], [[4, 0], [4, 0]]]
    schedule = Schedule(np.zeros(2, np.int32), np.arange(2, dtype=np.int32), np.zeros(1, np.int32), 2)
    workload = Workload.known(np.array([counts_LRE], np.int32))
    replica_P2 = np.array([[0, 1]])
    cluster = ClusterSpec(2, 2, 1)
    plan = StepPlan.from_instances(
        schedule, Placement.contiguous(2, 2, 2),
        [replica_P2 if both_layers else np.empty((0, 2), np.int64), replica_P2],
        [np.array([[0, 1]]) if both_layers else np.empty((0, 2), np.int64), np.array([[0, 2]])],
        mixed_ML=workload.mixed_ML, cluster=cluster,
    )  # fmt: skip
    plan = replace(plan, replica_paths=np.zeros_like(plan.replica_paths))
    plan.check(workload)
    costs = free_costs(
        token_s=0.25, row_s=0.5, near_row_s=0.5, hop_row_s=0.25, near_spare=0.5, near_weights_s=8.0, near_gradient_s=3.0
    )
    return Case(plan, workload, np.array([4, 4]), costs, cluster, Traits(**traits), StepSettings())


def check(case: Case, seconds: float, **parts: float) -> None:
    step = case.run()
    assert step.parts_s == pytest.approx(dict.fromkeys(PARTS, 0.0) | parts)
    assert step.step_time_s == pytest.approx(seconds)


def test_without_transfer_costs_replicas_cost_nothing() -> None:
    case = small_case(known_at="past", transfers_start="step").free("near_weights_s", "near_gradient_s")
    # Rank 0 is last everywhere.
    check(case, 9 + 9 + 16, attention=2 + 2 + 4, dispatch=2 + 2 + 2, experts=4 + 4 + 8, imbalance=1 + 1 + 2)


def test_shared_slots() -> None:
    # Weights set out as the pass begins, lose half of the second of dispatch, and come after 8.5 s; rank 1 computes
    # until 9.5, combines until 10.5. In backward the replica is there, and its gradient comes home under the rest.
    case = small_case(known_at="past", transfers_start="step")
    check(case, 10.5 + 10.5 + 16, attention=8, dispatch=6, experts=16, imbalance=-1 - 1 + 2, transfers=3.5 + 3.5)


@pytest.mark.parametrize(
    ("changes", "transfers"),
    [
        ({}, 3.5 + 3.5),
        # Weights come after 20 s instead of 8.5.
        ({"near_weights_s": 20.0, "near_spare": 1.0}, 15.0 + 15.0),
    ],
)
def test_predictions_are_worked_out_the_same_way(changes: dict[str, float], transfers: float) -> None:
    case = small_case(known_at="past", transfers_start="step").but(**changes)
    found = predict([case.plan], [case.workload], StepCosts(case.costs, 2, 3), lengths=[case.lengths])
    expected = {"attention": 8, "dispatch": 6, "experts": 16, "imbalance": 0, "transfers": transfers}
    assert found.parts_s == pytest.approx(dict.fromkeys(PARTS, 0.0) | expected)


def test_a_micro_steps_transfers_start_as_those_of_a_step() -> None:
    early, later = (small_case(known_at="past", transfers_start=start).run() for start in ("step", "micro-step"))
    assert early.parts_s == later.parts_s


def test_live_planning_delays_each_layer() -> None:
    # Every layer's forward is planned in 1 s. The weights set out at 6, beside dispatch, and come at 14.5. The gradient
    # leaves 3 s after the backward begins and takes 40: it is home at 36 + 40.
    case = small_case(known_at="layer", transfers_start="layer", planning=planning_time(1 / MICROSECOND))
    parts: dict[str, float] = {"attention": 8, "dispatch": 6, "experts": 16, "planning": 4}
    check(case, 16.5 + 16.5 + 16, **parts, imbalance=-1 - 1 + 2, transfers=7.5 + 7.5)
    waiting = case.but(near_gradient_s=40.0, near_spare=1.0)
    # Without what dispatch took from the weights both forwards end half a second sooner.
    check(waiting, 16 + 16 + 3 + 40, **parts, imbalance=-1 - 1 + 2, transfers=7 + 7 + 43 - 16)


def test_dispatch_waits_for_weights_if_required() -> None:
    # They have the link to themselves, from 6 to 14; then rank 0 is last.
    case = small_case(known_at="layer", planning=planning_time(1 / MICROSECOND), waits_for_weights=True)
    parts: dict[str, float] = {"attention": 8, "dispatch": 6, "experts": 16, "planning": 4}
    check(case, 19 + 19 + 16, **parts, imbalance=1 + 1 + 2, transfers=8 + 8)


def test_slots_of_every_layer() -> None:
    # Brought once, and slowed down by the first dispatch. The gradient leaves when its rank has computed, 3 s after the
    # backward began, takes 20 and loses half of the second of dispatch.
    case = small_case(known_at="past", transfers_start="step", copies="layer slots").but(near_gradient_s=20.0)
    parts: dict[str, float] = {"attention": 8, "dispatch": 6, "experts": 16}
    check(case, 10.5 + 9 + 23.5, **parts, imbalance=-1 + 1 + 2, transfers=3.5 + (23.5 - 16))


def test_transfers_take_a_part_of_their_seconds_from_compute_of_both_ranks() -> None:
    # Weights of 8 s take 2 s from each rank. Rank 1 has them to spare, since it waits until 8.5, and is done at 9.5;
    # rank 0 computes from 5 + 2 to 10. The gradient's 3 s take 0.75 from both, when they have computed.
    case = small_case(known_at="past", transfers_start="step").but(transfer_tax=0.25)
    parts: dict[str, float] = {"attention": 8, "dispatch": 6, "experts": 16}
    check(case, 11 + 11 + 16.75, **parts, imbalance=1 + 1 + 2, transfers=2 + 2 + 0.75)
    # From host memory nothing is taken from the home, and dispatch does not slow weights down, which come at 8.
    host = case.but(host_weights_s=8.0, host_path=True)
    host = replace(host, plan=replace(host.plan, replica_paths=np.ones(1, np.uint8)))
    check(host, 8 + 10 + 10 + 16.75, **parts, imbalance=-1 - 1 + 2, transfers=3 + 3 + 0.75, migration=8)


def test_a_ring_of_one_layer_fetches_again_and_without_bounds_nothing_is() -> None:
    # Now both layers have a replica; of layer 0's rows one of rank 1 is for it, so rank 0 computes 4 rows as before,
    # rank 1 its 3 and the other one.
    parts: dict[str, float] = {"attention": 8, "experts": 16}
    shared = small_case(both_layers=True, known_at="past", transfers_start="step").but(near_weights_s=5.0)
    # Forward, a place for each layer: layer 0 waits from 1 to 5 and ends at 7; layer 1's weights come from 5 on, lose
    # half of dispatch's second (8 to 9), come at 10.5, and its rows end at 11.5, before rank 0's at 12; then combine.
    # Layer 0's gradient leaves 14 s after the backward began, and is home a second after its end.
    check(shared, 13 + 13 + 17, **parts, dispatch=6, imbalance=1 + 1 + 2, transfers=4 + 4 + 1)
    # One place for both: layer 1's weights leave at 8, when its ranks meet, and come at 13.5; its rows end at 14.5, and
    # combine at 15.5. In backward layer 1's are there; layer 0's leave when its ranks meet, after 10 s, come at 15, and
    # the rest takes 6 and the gradient.
    one = shared.but(ring_layers=1)
    check(one, 15.5 + 15.5 + 22, **parts, dispatch=6, imbalance=-1 - 1 + 2, transfers=8.5 + 8.5 + 5 + 1)
    # Without bounds the same forward, but no fetching in backward.
    check(one.but(copies="unbounded"), 15.5 + 15.5 + 17, **parts, dispatch=6, imbalance=-1 - 1 + 2, transfers=17 + 1)
    # Room for one layer's gradients: home waits for layer 1's until 4 s after it left (at 3), not until 13 (at 16).
    slow = one.but(near_gradient_s=20.0, near_spare=1.0)
    # Forward 15 each. Backward: layer 1's gradient leaves after 3 s, is home after 23. Layer 0's rows end at 15 + 4;
    # home waits until 23 before the layer goes on, attention until 25; layer 0's gradient left at 19, is home at 43.
    check(slow, 15 + 15 + 43, **parts, dispatch=6, imbalance=-1 - 1 + 2, transfers=8 + 8 + 5 + 4 + 18)


def test_two_hops_overlap_with_experts_that_do_not_move() -> None:
    # All four rows of rank 1 go to the home first, in 2 s; two come back in 0.5 s, and weights and rows wait until the
    # layer is planned, beside the experts that stay. Weights come at 15, rank 1 computes until 16 and sends the rows
    # home until 16.5; combine takes 2. In backward rank 0 is last: 2 + 6 + 0.5 + 2, attention 2, layer 0 takes 6.
    case = small_case(known_at="layer", planning=planning_time(1 / MICROSECOND), hops=2)
    check(case, 18.5 + 18.5 + 18.5, attention=8, dispatch=4.5 * 3, experts=16, imbalance=-1 - 1 + 2, transfers=9 + 9)


def test_planning_moves_and_mirrors_precede_the_step() -> None:
    case = small_case(known_at="step", transfers_start="step", planning=planning_time(1 / MICROSECOND), host_path=True)
    case = replace(case.but(host_weights_s=2.0, near_state_s=5.0), cluster=replace(case.cluster, planning_threads=4))
    case = replace(case, plan=replace(case.plan, replica_paths=np.ones(1, np.uint8)))
    # The schedule of 2 instances takes half a second each; homes are planned during the rollout, on four cores. One
    # entry of the mirror is written in 2 s. From host memory weights come in time.
    parts: dict[str, float] = {"attention": 8, "dispatch": 6, "experts": 16, "imbalance": 4, "planning": 1}
    second = 1 / MICROSECOND
    case = case.but(planning=planning_time(0.0, schedule_instance=second / 2, homes=8 * second))
    check(case, 34 + 1 + 2, **parts, migration=2)
    assert case.run().hidden_planning_s == pytest.approx(2 * 8 / 4)
    # Both experts of layer 0 changed places: each rank sends one and gets one, at once.
    before = Placement(np.array([[1, 0], [0, 1]], np.int16))
    check(replace(case, before=before), 34 + 1 + 2 + 5, **parts, migration=7)


def test_a_micro_step_waits_until_it_is_planned() -> None:
    case = small_case(known_at="step", transfers_start="micro-step").free("near_weights_s", "near_gradient_s")
    parts: dict[str, float] = {"attention": 8, "dispatch": 6, "experts": 16, "imbalance": 4}
    # Each rank plans one of the two layers in 3 s and sends its part in 1 s; joining a layer takes half a second.
    times: dict[str, Any] = {"join": 0.5 / MICROSECOND, "exchange": Exchange(1 / MICROSECOND)}
    case = case.but(planning=planning_time(3 / MICROSECOND, **times))
    # The header is sent in 1 s.
    check(case, 34 + 1 + 5, **parts, planning=1 + 5)
    assert case.run().hidden_planning_s == 0
    # Homes move in 2 s, beside the round.
    moving = replace(case.but(near_state_s=2.0), before=Placement(np.array([[1, 0], [0, 1]], np.int16)))
    check(moving, 34 + 1 + 5, **parts, planning=1 + 3, migration=2)
    assert moving.run().hidden_planning_s == 2


def test_later_micro_steps_are_planned_while_earlier_ones_run() -> None:
    """Three micro-steps in one mini-batch, forward first: the second waits for nothing, the third is long planned."""
    one = small_case(known_at="step", transfers_start="never", copies="none")
    schedule = Schedule(np.arange(6, dtype=np.int32) // 2, np.arange(6, dtype=np.int32) % 2, np.zeros(3, np.int32), 2)
    workload = Workload.known(np.tile(one.workload.token_counts_MLRE, (3, 1, 1, 1)))
    nothing = [np.empty((0, 2), np.int64)] * 6
    plan = StepPlan.from_instances(
        schedule, Placement.contiguous(2, 2, 2), nothing, nothing, mixed_ML=workload.mixed_ML, cluster=one.cluster
    )
    case = replace(one, plan=plan, workload=workload, lengths=np.full(6, 4))
    # Without replicas rank 0 computes eight rows in layer 1, four of which are sent in 2 s.
    forward_s = 1 + 2 + 1 + 2 + 4 + 2
    for round_s, exposed_s in ((0.5, 0.5), (1.0, 1.0), (2.0, 2.0 + 2 * 1.0)):
        planned = case.but(planning=planning_time(round_s * forward_s / MICROSECOND))
        step = planned.run()
        assert step.parts_s["planning"] == pytest.approx(exposed_s * forward_s)
        assert step.step_time_s == pytest.approx(case.run().step_time_s + exposed_s * forward_s)
        assert step.hidden_planning_s == pytest.approx((3 * round_s - exposed_s) * forward_s)


def test_gradient_sums_overlap_with_the_last_backward() -> None:
    case = small_case(known_at="past", transfers_start="never", copies="none").but(optimizer_s=3.0)
    for reduce_s, exposed in ((15.0, 0.0), (20.0, 4.0)):
        step = case.but(reduce_s=reduce_s).run()
        assert step.step_time_s == pytest.approx(34 + 3 + exposed)
        assert step.parts_s["optimizer"] == pytest.approx(3 + exposed)


def test_the_ideal_run_has_even_rows_and_no_transfers() -> None:
    # Each rank computes four rows of each layer, and sends half of its own to the other: 1 s. Nothing is moved.
    case = small_case(known_at="step", transfers_start="never", copies="none", ideal=True, planning=planning_time(1.0))
    check(case, 2 * (2 + 4 * 1 + 4) + (4 + 4 * 1 + 8), attention=8, dispatch=12, experts=16)
