"""Passes over the layers: operations of every rank in sequence, synchronisation, and concurrent transfers.

The ranks of an expert-parallel group synchronise before every all-to-all; each continues when its own rows are
complete. Weights and gradients of replicas use the links at the same time (`replica_transfers.py`). Every rank records
its time by part; where ranks synchronise, all take over the record of the last rank. The final parts are therefore
those of the critical path and add up to the whole time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts
from trimtab.kernels import kernel
from trimtab.timeline import DISPATCH, EXPERTS, IMBALANCE, PLANNING
from trimtab.timeline import recorded_operations as rec
from trimtab.timeline.clocks import NO_LAYER, Clocks, compute, record, synchronise, wait
from trimtab.timeline.replica_transfers import (
    TIME,
    Copies,
    Transfers,
    call,
    fetch,
    fetch_kept,
    note_moment,
    pay_tax,
    return_gradients,
    return_kept_gradients,
)

# Memory of copies: none, slots shared by layers, slots for the whole step, or unbounded.
NONE, SHARED, KEPT, UNBOUNDED = range(4)
# Start of weight transfers: when weights are new, when the micro-step begins, or after the layer's router.
AT_STEP, AT_MICRO_STEP, AT_LAYER = range(3)
# With live planning, the plan is known in backward, and weights are transferred one layer ahead.
PLACES_IN_LIVE_BACKWARD = 2


class RankWork(NamedTuple):
    """Seconds of every rank in the forward of every instance, for each operation separately.

    Attributes:
        experts_MLR: `[M, L, R]` float64, the copies of experts on this rank; with two hops those that don't move.
        moved_MLR: `[M, L, R]` float64, with two hops the experts that moved here; else 0.
        near_MLR, far_MLR: `[M, L, R]` float64, transfers through the rank's all-to-all inside its node and between
            nodes, the larger of those sent and received. Dispatch and combine take this time each.
        hop_MLR: `[M, L, R]` float64, with two hops the rows that move on inside the node; else 0.
        loads_MLR: `[M, L, R]` int64 rows that the rank computes.
    """

    experts_MLR: Array
    moved_MLR: Array
    near_MLR: Array
    far_MLR: Array
    hop_MLR: Array
    loads_MLR: Array


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
    hops: int = 1
    waits_first: bool = False
    groups_meet: bool = False
    planning_s: float = 0.0


class Run(NamedTuple):
    """Input and state of passes of D ranks in G groups.

    Attributes:
        attention_MR, outer_MR: `[M, R]` float64 seconds, forward of a MoE layer's dense parts, and of everything
            outside MoE layers.
        dispatch_s, dense_backward, expert_backward: of `OperationCosts`.
        begun_G8R: the moments (`Transfers`) when each group's pass over the layers began.
        num_fetched_G: `[G]` int64, instances with replicas in this pass so far.
        met_GL8R: the moments when the ranks of a group synchronised in each of these instances.
        exchange_2MR, outer_exchange_2MR: `[2, M, R]` float64 seconds, forward and backward, in which ranks that share
            sequences exchange them in a layer, and outside of MoE layers; `[2, 0, R]` for none.
        spent_GX: `[G, L + 2]` float64 seconds of the last pass, of the latest rank of the group: of each layer, and of
            what is outside of MoE layers; and when that ended.
    """

    attention_MR: Array
    outer_MR: Array
    work: RankWork
    dispatch_s: float
    dense_backward: float
    expert_backward: float
    recipe: Recipe
    clocks: Clocks
    transfers: Transfers
    begun_G8R: Array
    num_fetched_G: Array
    met_GL8R: Array
    exchange_2MR: Array
    outer_exchange_2MR: Array
    spent_GX: Array

    @classmethod
    def at_zero(
        cls, dense: tuple[Array, ...], work: RankWork, costs: OperationCosts, recipe: Recipe, copies: Copies,
        *, groups: int = 1,
    ) -> Run:  # fmt: skip
        """Passes that have not begun.

        Args:
            dense: `attention_MR` and `outer_MR`, and the two of exchanges, if there are any.
        """
        _, layers, ranks = work.experts_MLR.shape
        exchanges = dense[2:] or (np.zeros((2, 0, ranks)),) * 2
        return cls(
            attention_MR=dense[0],
            outer_MR=dense[1],
            work=work,
            dispatch_s=costs.dispatch_s,
            dense_backward=costs.dense_backward,
            expert_backward=costs.expert_backward,
            recipe=recipe,
            clocks=Clocks.at_zero(groups * ranks),
            transfers=Transfers.none(copies, costs, (groups, layers, ranks), recipe.places, keeps=recipe.store == KEPT),
            begun_G8R=np.zeros((groups, 8, ranks)),
            num_fetched_G=np.zeros(groups, np.int64),
            met_GL8R=np.zeros((groups, layers, 8, ranks)),
            exchange_2MR=exchanges[0],
            outer_exchange_2MR=exchanges[1],
            spent_GX=np.zeros((groups, layers + 2)),
        )


@kernel
def run_pass(run, order_G, closes_G, backward):  # type: ignore[no-untyped-def]
    """One round's micro-steps, forward or backward: all layers, and the parts outside them.

    Copies kept for the step send their gradients to the homes in the last backward of the mini-batch.

    Args:
        order_G, closes_G: of `Rounds`.
    """
    clocks, recipe = run.clocks, run.recipe
    _, num_layers, ranks = run.work.experts_MLR.shape
    factor = run.dense_backward if backward else 1.0
    way = np.int64(1) if backward else np.int64(0)
    for g in range(len(order_G)):
        first, m = g * ranks, order_G[g]
        note_moment(run.transfers.now_G8R[g], clocks.time_D[first : first + ranks], run.begun_G8R[g])
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
            pay_tax(run.transfers, clocks, g, NO_LAYER)


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
    arrival_R = transfers.arrival_GR[g]
    near_R, far_R = work.near_MLR[m, layer], work.far_MLR[m, layer]
    fetches = False
    if recipe.store == SHARED or recipe.store == UNBOUNDED:
        fetches = transfers.copies.starts[i + 1] > transfers.copies.starts[i]
    if recipe.hops == 1 and not backward:
        _plan(clocks, first, last, recipe.planning_s, layer)
    synchronise(clocks, first, last)
    k = run.num_fetched_G[g]
    if fetches:
        note_moment(transfers.now_G8R[g], clocks.time_D[first:last], run.met_GL8R[g, k])
        run.num_fetched_G[g] += 1
    moment_8R = _free_since(run, g, k, backward)
    # The last instances of forward are still in their places; unbounded copies all are.
    is_there = backward and (recipe.store == UNBOUNDED or k < recipe.places)
    waits_first = recipe.waits_first and not backward
    arrival_R[:] = 0.0
    if fetches and not is_there and waits_first:
        fetch(transfers, clocks, g, i, moment_8R, layer)
        _wait_for_weights(clocks, first, arrival_R, layer)
        synchronise(clocks, first, last)
    kind = rec.COMBINE if backward else rec.DISPATCH
    _all_to_all(run, g, (near_R, far_R), kind, layer)
    release = 0.0
    if recipe.hops == 2 and not backward:
        # Planned while experts that do not move compute.
        release = clocks.time_D[first:last].max()
        record(clocks, rec.PLANNING, rec.CPU_LANE, first, layer, (release, release + recipe.planning_s))
        release += recipe.planning_s
        moment_8R = transfers.now_G8R[g]
        for r in range(ranks):
            moment_8R[TIME, r] = release
    if fetches and not is_there and not waits_first:
        fetch(transfers, clocks, g, i, moment_8R, layer)
    if recipe.store == KEPT:
        fetch_kept(transfers, clocks, g, layer)
    pay_tax(transfers, clocks, g, layer)
    factor = run.expert_backward if backward else 1.0
    if recipe.hops == 2:
        seconds = (work.experts_MLR[m, layer], work.moved_MLR[m, layer], work.hop_MLR[m, layer])
        _compute_in_two_hops(clocks, first, seconds, factor, (release, arrival_R), layer)
    else:
        _wait_for_weights(clocks, first, arrival_R, layer)
        compute(clocks, first, work.experts_MLR[m, layer], factor, rec.EXPERTS, layer)
    if backward and recipe.store == KEPT:
        note_moment(transfers.now_G8R[g], clocks.time_D[first:last], transfers.computed_GL8R[g, layer])
    if backward and fetches:
        return_gradients(transfers, clocks, g, i, k if recipe.store == SHARED else np.int64(-1), layer)
        pay_tax(transfers, clocks, g, layer)
    synchronise(clocks, first, last)
    kind = rec.DISPATCH if backward else rec.COMBINE
    _all_to_all(run, g, (near_R, far_R), kind, layer)


@kernel
def _wait_for_weights(clocks, first, arrival_R, layer):  # type: ignore[no-untyped-def]
    for r in range(len(arrival_R)):
        if arrival_R[r] > clocks.time_D[first + r]:
            wait(clocks, first + r, arrival_R[r], layer)


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
def _free_since(run, g, k, backward):  # type: ignore[no-untyped-def]
    """The moment since which there is a place for a pass's k-th instance with replicas."""
    is_live = run.recipe.start == AT_LAYER
    if is_live and not backward:
        return run.met_GL8R[g, k] if k < run.num_fetched_G[g] else run.begun_G8R[g]
    places = PLACES_IN_LIVE_BACKWARD if is_live else run.recipe.places
    return run.begun_G8R[g] if k < places else run.met_GL8R[g, k - (places - 1)]


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
        # Also who gets no rows waits until that is known.
        wait(clocks, d, release, layer)
        if moved_s > 0.0:
            wait(clocks, d, max(rows_are_here, arrival_R[r]), layer)
            record(clocks, rec.EXPERTS, rec.COMPUTE_LANE, d, layer, (clocks.time_D[d], clocks.time_D[d] + moved_s))
        clocks.time_D[d] += moved_s + hop_s
        clocks.parts_DP[d, EXPERTS] += mean_s
        clocks.parts_DP[d, IMBALANCE] += stay_s + moved_s - mean_s
        clocks.parts_DP[d, DISPATCH] += hop_s


@kernel
def _all_to_all(run, g, seconds, kind, layer):  # type: ignore[no-untyped-def]
    """An all-to-all; `seconds` inside the node and between nodes, both `[R]` float64."""
    clocks, dispatch_s = run.clocks, run.dispatch_s
    taken, now_8R = run.transfers.taken, run.transfers.now_G8R[g]
    near_R, far_R = seconds
    time_D, parts_DP, first = clocks.time_D, clocks.parts_DP, g * len(near_R)
    for r in range(len(near_R) if len(clocks.rows_NC) > 0 else 0):
        d, time = first + r, time_D[first + r]
        record(clocks, kind, rec.COMPUTE_LANE, d, layer, (time, time + dispatch_s + max(near_R[r], far_R[r])))
        record(clocks, kind, rec.NODE_LANE, d, layer, (time, time + near_R[r]))
        record(clocks, kind, rec.NETWORK_LANE, d, layer, (time, time + far_R[r]))
    for r in range(len(near_R)):
        taken_s = dispatch_s + max(near_R[r], far_R[r])
        call(taken, now_8R, r, time_D[first + r], near_R[r], far_R[r])
        time_D[first + r] += taken_s
        parts_DP[first + r, DISPATCH] += taken_s
