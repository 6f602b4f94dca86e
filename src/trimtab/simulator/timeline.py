"""Timeline model: operations of every rank in sequence, synchronisation between ranks, and concurrent transfers.

The ranks of an expert-parallel group synchronise before every all-to-all; each continues when its own rows are
complete. Weights and gradients of replicas use the links at the same time (`replica_transfers.py`, `links.py`). Every
rank records its time by part; where ranks synchronise, all take over the record of the last rank. The final parts are
therefore those of the critical path and add up to the step.

Recompute runs all micro-steps forward. Then each mini-batch runs its micro-steps forward and backward, gradients are
returned to the homes, and the optimizer steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts
from trimtab.kernels import copy_values, kernel
from trimtab.planner.plan.pass_times import (
    DISPATCH,
    EXPERTS,
    IMBALANCE,
    MIGRATION,
    OPTIMIZER,
    PLANNING,
    TRANSFERS,
)
from trimtab.planner.plan.rank_work import RankWork
from trimtab.simulator import recorded_operations as rec
from trimtab.simulator.clocks import (
    NO_LAYER,
    Clocks,
    compute,
    record,
    synchronise,
    wait,
)
from trimtab.simulator.links import occupy
from trimtab.simulator.pipeline import PassTimes
from trimtab.simulator.recorded_operations import Operations
from trimtab.simulator.replica_transfers import (
    Transfers,
    fetch,
    fetch_kept,
    return_gradients,
    return_kept_gradients,
)

# Memory of copies: none, slots shared by layers, slots for the whole step, or unbounded.
NONE, SHARED, KEPT, UNBOUNDED = range(4)
# Start of weight transfers: when weights are new, when the micro-step begins, or after the layer's router.
AT_STEP, AT_MICRO_STEP, AT_LAYER = range(3)
# With live planning, the plan is known in backward, and weights are transferred one layer ahead.
PLACES_IN_LIVE_BACKWARD = 2


class Rounds(NamedTuple):
    """The micro-step of each of G groups in each of Q rounds.

    Attributes:
        order_QG: `[Q, G]` int64, -1 for none.
        mini_batch_Q: `[Q]` int64, ascending.
        closes_QG: `[Q, G]` bool, true for the group's last of its mini-batch.
        ready_Q: `[Q]` float64 seconds, ascending, when replicas and split of the micro-steps are planned.
    """

    order_QG: Array
    mini_batch_Q: Array
    closes_QG: Array
    ready_Q: Array


class Recipe(NamedTuple):
    """How a balancer plans and transfers.

    Attributes:
        store: memory of copies.
        start: start of weight transfers.
        places: layers with shared copies at the same time.
        hops: 2 if moved tokens are first sent to the home rank.
        waits_first: true: weights must be present before dispatch.
        groups_meet: true: groups synchronise in every layer.
        planning_s: of one layer with live planning; else 0.
    """

    store: int
    start: int
    places: int
    hops: int
    waits_first: bool
    groups_meet: bool
    planning_s: float


class Run(NamedTuple):
    """Input and state of a simulation of D ranks in G groups.

    Attributes:
        attention_MR, outer_MR: `[M, R]` float64 seconds, forward of a MoE layer's dense parts, and of everything
            outside MoE layers.
        pass_start_G: `[G]` float64, when the group's pass over the layers began.
        num_fetched_G: `[G]` int64, instances with replicas in this pass so far.
        fetch_time_GL: `[G, L]` float64, when the ranks of a group synchronised in each of these instances.
        exchange_2MR, outer_exchange_2MR: `[2, M, R]` float64 seconds, forward and backward, in which ranks that share
            sequences exchange them in a layer, and outside of MoE layers; `[2, 0, R]` for none.
        spent_GX: `[G, L + 2]` float64 seconds of the last pass, of the latest rank of the group: of each layer, and of
            what is outside of MoE layers; and when that ended.
    """

    attention_MR: Array
    outer_MR: Array
    work: RankWork
    costs: OperationCosts
    recipe: Recipe
    clocks: Clocks
    transfers: Transfers
    pass_start_G: Array
    num_fetched_G: Array
    fetch_time_GL: Array
    exchange_2MR: Array
    outer_exchange_2MR: Array
    spent_GX: Array


def run_step(
    run: Run,
    rounds: Rounds,
    *,
    refresh_s: float,
    recompute: bool,
    checkpointing: bool,
    shown_round: int,
    memory: int,
    times: PassTimes | None = None,
) -> Operations:
    """Simulate a step on clocks at time 0.

    Args:
        refresh_s: seconds to refresh the mirrors after an optimizer step.
        recompute: true: all micro-steps first run forward only.
        checkpointing: true: every micro-step runs forward again before its backward, with the plan that it has.
        shown_round: whose update is recorded; -1 for none.
        memory: most operations of a round.
        times: gets the seconds of all passes; phases end when log-probabilities are recomputed, and with mini-batches.

    Returns:
        The operations of the shown round.
    """
    clocks, transfers, costs = run.clocks, run.transfers, run.costs
    time_D, parts_DP = clocks.time_D, clocks.parts_DP
    rows_N6, origin_s = np.zeros((0, 6)), 0.0
    last = len(rounds.mini_batch_Q) - 1

    def one_pass(run: Run, q: int, backward: bool, *, again: bool = False) -> None:
        """`again`: activations are computed again, which counts as backward."""
        run_pass(run, rounds.order_QG[q], rounds.closes_QG[q], backward)
        if times is not None:
            for g in np.flatnonzero(rounds.order_QG[q] >= 0).tolist():
                spent_X = run.spent_GX[g, :-1].copy()
                times.phases[-1].append((g, int(rounds.order_QG[q, g]), backward or again, spent_X))

    if times is not None:
        times.phases.append([])
    for q in range(last + 1 if recompute else 0):
        _wait_for_plan(clocks, rounds.order_QG[q], rounds.ready_Q[q])
        one_pass(run, q, False)
    for q, mini_batch in enumerate(rounds.mini_batch_Q):
        if times is not None and (q == 0 or mini_batch != rounds.mini_batch_Q[q - 1]):
            times.phases.append([])
        if q > 0 and mini_batch != rounds.mini_batch_Q[q - 1]:
            transfers.kept_from_GL[:] = time_D.min()
        _wait_for_plan(clocks, rounds.order_QG[q], rounds.ready_Q[q])
        this = run
        if q == shown_round:
            rows_N6, origin_s = np.zeros((memory, 6)), float(time_D.min())
            this = run._replace(clocks=clocks._replace(operations_N6=rows_N6))
        one_pass(this, q, False)
        if checkpointing:
            planned = this._replace(recipe=this.recipe._replace(planning_s=0.0))
            one_pass(planned, q, False, again=True)
        backward_start = time_D.max()
        one_pass(this, q, True)
        if q < last and mini_batch == rounds.mini_batch_Q[q + 1]:
            continue
        parts_DP[:, TRANSFERS] += np.maximum(transfers.returned_D - time_D, 0.0)
        np.maximum(time_D, transfers.returned_D, out=time_D)
        parts_DP[:] = parts_DP[time_D.argmax()]
        time_D[:] = time_D.max()
        # Sums of dense gradients overlap with the last backward.
        optimizer_s = max(0.0, costs.reduce_s - (time_D[0] - backward_start)) + costs.optimizer_s
        moving_s = refresh_s if q < last else 0.0
        time_D += optimizer_s + moving_s
        parts_DP[:, OPTIMIZER] += optimizer_s
        parts_DP[:, MIGRATION] += moving_s
    return Operations.from_rows(rows_N6[: clocks.num_operations[0]], origin_s)


def _wait_for_plan(clocks: Clocks, order_G: Array, ready_s: float) -> None:
    """The ranks of groups with a micro-step wait until it is planned."""
    time_D, parts_DP = clocks.time_D, clocks.parts_DP
    has_one_D = np.repeat(order_G >= 0, len(time_D) // len(order_G))
    wait_D = np.where(has_one_D, np.maximum(ready_s - time_D, 0.0), 0.0)
    time_D += wait_D
    parts_DP[:, PLANNING] += wait_D


@kernel
def run_pass(run, order_G, closes_G, backward):  # type: ignore[no-untyped-def]
    """One round's micro-steps, forward or backward: all layers, and the parts outside them.

    Copies kept for the step send their gradients to the homes in the last backward of the mini-batch.

    Args:
        order_G, closes_G: of `Rounds`.
    """
    clocks, recipe = run.clocks, run.recipe
    _, num_layers, ranks = run.work.experts_MLR.shape
    factor = run.costs.dense_backward if backward else 1.0
    way = np.int64(1) if backward else np.int64(0)
    for g in range(len(order_G)):
        first, m = g * ranks, order_G[g]
        run.pass_start_G[g] = clocks.time_D[first : first + ranks].min()
        run.num_fetched_G[g] = 0
        run.spent_GX[g, num_layers + 1] = clocks.time_D[first : first + ranks].max()
        if backward and m >= 0:
            compute(clocks, first, run.outer_MR[m], factor, rec.HEAD, NO_LAYER)
            _exchange(clocks, first, run.outer_exchange_2MR[way], m, rec.HEAD, NO_LAYER)
            _note_seconds(run, g, num_layers)
    for i in range(num_layers):
        layer = num_layers - 1 - i if backward else i
        if recipe.groups_meet:
            synchronise(clocks, np.int64(0), len(clocks.time_D))
        for g in range(len(order_G)):
            first, m = g * ranks, order_G[g]
            if m < 0:
                continue
            if not backward:
                compute(clocks, first, run.attention_MR[m], factor, rec.ATTENTION, layer)
                _exchange(clocks, first, run.exchange_2MR[way], m, rec.ATTENTION, layer)
            _moe_layer(run, g, m, layer, backward)
            if backward:
                copy_values(clocks.time_D[first : first + ranks], run.transfers.done_by_GLR[g, layer])
                compute(clocks, first, run.attention_MR[m], factor, rec.ATTENTION, layer)
                _exchange(clocks, first, run.exchange_2MR[way], m, rec.ATTENTION, layer)
            _note_seconds(run, g, layer)
    for g in range(len(order_G)):
        if not backward and order_G[g] >= 0:
            compute(clocks, g * ranks, run.outer_MR[order_G[g]], factor, rec.HEAD, NO_LAYER)
            _exchange(clocks, g * ranks, run.outer_exchange_2MR[way], order_G[g], rec.HEAD, NO_LAYER)
            _note_seconds(run, g, num_layers)
        if backward and closes_G[g] and recipe.store == KEPT:
            return_kept_gradients(run.transfers, clocks, g)


@kernel
def _exchange(clocks, first, exchange_MR, m, kind, layer):  # type: ignore[no-untyped-def]
    """Ranks that share sequences exchange them, if any do."""
    if len(exchange_MR) > 0:
        compute(clocks, first, exchange_MR[m], 1.0, kind, layer)


@kernel
def _note_seconds(run, g, place):  # type: ignore[no-untyped-def]
    """Since the last note, of the group's latest rank."""
    _, num_layers, ranks = run.work.experts_MLR.shape
    now = run.clocks.time_D[g * ranks : (g + 1) * ranks].max()
    run.spent_GX[g, place] = now - run.spent_GX[g, num_layers + 1]
    run.spent_GX[g, num_layers + 1] = now


@kernel
def _moe_layer(run, g, m, layer, backward):  # type: ignore[no-untyped-def]
    """Dispatch, experts and combine of one instance, or their backward."""
    clocks, transfers, work, recipe = run.clocks, run.transfers, run.work, run.recipe
    _, num_layers, ranks = work.experts_MLR.shape
    first, last, i = g * ranks, (g + 1) * ranks, m * num_layers + layer
    arrival_R = transfers.arrival_D[first:last]
    near_R, far_R = work.near_MLR[m, layer], work.far_MLR[m, layer]
    fetches = False
    if recipe.store == SHARED or recipe.store == UNBOUNDED:
        fetches = transfers.copies.starts[i + 1] > transfers.copies.starts[i]
    if recipe.hops == 1 and not backward:
        _plan(clocks, first, last, recipe.planning_s, layer)
    synchronise(clocks, first, last)
    k = run.num_fetched_G[g]
    if fetches:
        run.fetch_time_GL[g, k] = clocks.time_D[first]
        run.num_fetched_G[g] += 1
    release = _release(run, g, k, clocks.time_D[first], backward)
    # The last instances of forward are still in their places; unbounded copies all are.
    is_there = backward and (recipe.store == UNBOUNDED or k < recipe.places)
    waits_first = recipe.waits_first and not backward
    arrival_R[:] = 0.0
    if fetches and not is_there and waits_first:
        fetch(transfers, clocks, i, first, release, layer)
        for d in range(first, last):
            wait(clocks, d, transfers.arrival_D[d], layer)
        synchronise(clocks, first, last)
    kind = rec.COMBINE if backward else rec.DISPATCH
    _all_to_all(clocks, transfers.links, first, (near_R, far_R, run.costs.dispatch_s), kind, layer)
    if recipe.hops == 2 and not backward:
        # Planned while experts that do not move compute.
        release = clocks.time_D[first:last].max()
        record(clocks, rec.PLANNING, rec.CPU_LANE, first, layer, (release, release + recipe.planning_s))
        release += recipe.planning_s
    if fetches and not is_there and not waits_first:
        fetch(transfers, clocks, i, first, release, layer)
    if recipe.store == KEPT:
        fetch_kept(transfers, clocks, g, layer)
    factor = run.costs.expert_backward if backward else 1.0
    if recipe.hops == 2:
        seconds = (work.experts_MLR[m, layer], work.moved_MLR[m, layer], work.hop_MLR[m, layer])
        _compute_in_two_hops(clocks, first, seconds, factor, (release, arrival_R), layer)
    else:
        for d in range(first, last):
            wait(clocks, d, transfers.arrival_D[d], layer)
        compute(clocks, first, work.experts_MLR[m, layer], factor, rec.EXPERTS, layer)
    if backward and fetches:
        return_gradients(transfers, clocks, i, first, k if recipe.store == SHARED else np.int64(-1), layer)
    synchronise(clocks, first, last)
    kind = rec.DISPATCH if backward else rec.COMBINE
    _all_to_all(clocks, transfers.links, first, (near_R, far_R, run.costs.dispatch_s), kind, layer)


@kernel
def _plan(clocks, first, last, planning_s, layer):  # type: ignore[no-untyped-def]
    """All ranks wait for the layer's plan, which starts when its counts are known."""
    if planning_s > 0.0:
        synchronise(clocks, first, last)
        for d in range(first, last):
            span = (clocks.time_D[d], clocks.time_D[d] + planning_s)
            record(clocks, rec.PLANNING, rec.CPU_LANE, d, layer, span)
            clocks.time_D[d] += planning_s
            clocks.parts_DP[d, PLANNING] += planning_s


@kernel
def _release(run, g, k, now, backward):  # type: ignore[no-untyped-def]
    """Earliest transfer start for a pass's k-th instance with replicas: when a place is free."""
    is_live = run.recipe.start == AT_LAYER
    if is_live and not backward:
        return now
    places = PLACES_IN_LIVE_BACKWARD if is_live else run.recipe.places
    return run.pass_start_G[g] if k < places else run.fetch_time_GL[g, k - (places - 1)]


@kernel
def _compute_in_two_hops(clocks, first, seconds, factor, available, layer):  # type: ignore[no-untyped-def]
    """Experts that do not move compute while others and their rows are sent inside the node; outputs are sent back.

    Args:
        seconds: experts that do not move, those that do, and rows of the latter, `[R]` float64 each.
        available: when rows may be sent, and `[R]` float64, when weights have arrived.
    """
    stay_R, moved_R, hop_R = seconds
    release, arrival_R = available
    mean_s = factor * (stay_R.mean() + moved_R.mean())
    for r in range(len(stay_R)):
        d = first + r
        stay_s, moved_s, hop_s = factor * stay_R[r], factor * moved_R[r], hop_R[r]
        rows_are_here = max(clocks.time_D[d], release) + hop_s
        record(clocks, rec.EXPERTS, rec.COMPUTE_LANE, d, layer, (clocks.time_D[d], clocks.time_D[d] + stay_s))
        clocks.time_D[d] += stay_s
        if moved_s > 0.0:
            wait(clocks, d, max(rows_are_here, arrival_R[r]), layer)
            record(clocks, rec.EXPERTS, rec.COMPUTE_LANE, d, layer, (clocks.time_D[d], clocks.time_D[d] + moved_s))
        clocks.time_D[d] += moved_s + hop_s
        clocks.parts_DP[d, EXPERTS] += mean_s
        clocks.parts_DP[d, IMBALANCE] += stay_s + moved_s - mean_s
        clocks.parts_DP[d, DISPATCH] += hop_s


@kernel
def _all_to_all(clocks, links, first, seconds, kind, layer):  # type: ignore[no-untyped-def]
    """An all-to-all; `seconds` inside the node and between nodes, both `[R]` float64, and fixed ones."""
    near_R, far_R, dispatch_s = seconds
    for r in range(len(near_R)):
        d = first + r
        time, taken_s = clocks.time_D[d], dispatch_s + max(near_R[r], far_R[r])
        occupy(links, d, time, near_R[r], far_R[r])
        record(clocks, kind, rec.COMPUTE_LANE, d, layer, (time, time + taken_s))
        record(clocks, kind, rec.NODE_LANE, d, layer, (time, time + near_R[r]))
        record(clocks, kind, rec.NETWORK_LANE, d, layer, (time, time + far_R[r]))
        clocks.time_D[d] += taken_s
        clocks.parts_DP[d, DISPATCH] += taken_s
